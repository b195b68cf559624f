"""A context that keeps its cells as llama.cpp does, around a model whose logits are drawn from what a row sees.

It refuses the batches that llama.cpp refuses, overwrites at once whatever a sliding window would let it overwrite, and
overwrites the logits of a batch by those of the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent_llama_cpp.context import BATCH, OutOfCells, Rows

VOCAB = 256


@dataclass(slots=True)
class Cell:
    """A stored token."""

    token: int
    position: int
    sequences: set[int] = field(default_factory=set)


class FakeContext:
    """`blind` makes it compute every row as if it saw all that is stored, which is wrong for trees."""

    threads, what = 1, {"llama.cpp": "fake"}

    def __init__(self, num_cells: int = 2048, window: int = 0, *, blind: bool = False, vocab_size: int = VOCAB) -> None:
        self.num_cells, self.window, self.blind, self.vocab_size = num_cells, window, blind, vocab_size
        self.cells: list[Cell] = []
        self.logits = np.empty((BATCH, vocab_size), np.float32)
        self.fails = 0
        self.most_rows = 0

    def decode(self, rows: Rows, num_logits: int) -> Tensor:
        self._check(rows)
        if len(rows.tokens) > min(BATCH, self.num_cells):
            raise OutOfCells("not enough memory for so many at once")
        self.most_rows = max(self.most_rows, len(rows.tokens))
        found = list[NDArray[np.float32]]()
        for token, position, sequences in zip(rows.tokens, rows.positions, rows.sequences, strict=True):
            self.cells.append(Cell(token, position, {*sequences}))
            self._overwrite()
            if len(self.cells) > self.num_cells:
                raise OutOfCells("not enough memory in the context")
            if len(found) < num_logits:
                found.append(self._logits(sequences[0], position))
        if self.fails:
            self.fails -= 1
            raise RuntimeError("llama_decode returned -3")
        for place, row in enumerate(found):
            self.logits[place] = row
        return torch.from_numpy(self.logits[:num_logits])

    def _check(self, rows: Rows) -> None:
        """What llama.cpp refuses: gaps, and sequences that share a row after they have parted."""
        last = {one: self._last(one) for each in rows.sequences for one in each}
        for position, sequences in zip(rows.positions, rows.sequences, strict=True):
            assert sequences, "each row belongs to a sequence"
            assert {last[one] for one in sequences} == {position - 1}, "coupled sequences stand at the same position"
            last.update(dict.fromkeys(sequences, position))

    def _last(self, sequence: int) -> int:
        return max((cell.position for cell in self.cells if sequence in cell.sequences), default=-1)

    def _overwrite(self) -> None:
        if self.window:
            lone = [cell for cell in self.cells if len(cell.sequences) == 1]
            gone = [cell for cell in lone if cell.position <= self._last(next(iter(cell.sequences))) + 1 - self.window]
            self.cells = [cell for cell in self.cells if cell not in gone]

    def _logits(self, sequence: int, position: int) -> NDArray[np.float32]:
        seen = [cell for cell in self.cells if sequence in cell.sequences or self.blind]
        seen = [cell for cell in seen if position - (self.window or position + 1) < cell.position <= position]
        text = sorted((cell.position, cell.token) for cell in seen)
        whole = min(position + 1, self.window or position + 1)
        assert self.blind or [place for place, _ in text] == list(range(position + 1 - whole, position + 1))
        draw = np.random.default_rng([0, *(number for pair in text for number in pair)])
        return draw.normal(size=self.vocab_size).astype(np.float32)

    def share(self, source: int, other: int, start: int, end: int) -> None:
        for cell in self.cells:
            if source in cell.sequences and start <= cell.position < end:
                cell.sequences.add(other)

    def remove(self, sequence: int, start: int = 0) -> None:
        for cell in self.cells:
            if cell.position >= start:
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]

    def state(self, sequence: int) -> NDArray[np.uint8]:
        own = [(cell.token, cell.position) for cell in self.cells if sequence in cell.sequences]
        return np.array([7, *(part for pair in own for part in pair)], dtype=np.int64).view(np.uint8)

    def set_state(self, sequence: int, state: NDArray[np.uint8]) -> bool:
        _, *parts = state.view(np.int64).tolist()
        if len(self.cells) + len(parts) // 2 > self.num_cells:
            return False
        for token, position in zip(parts[::2], parts[1::2], strict=True):
            self.cells.append(Cell(token, position, {sequence}))
        return True
