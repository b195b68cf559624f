"""`LlamaTarget`: a model that llama.cpp runs, as a target that scores candidate trees."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from precedent.errors import CapacityError
from precedent.target import Capabilities, Slot, Target
from precedent.target.contract import NOTHING_PENDING, Commit
from precedent.target.fingerprints import weights_digest
from precedent.target.runner import batches
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_llama_cpp.context import BATCH, MOST_SEQUENCES, OutOfCells, Rows

MOST_LEAVES = 32
"""Leaves of a tree at most: each needs a sequence of llama.cpp's."""

SPARE = 16
"""Sequences that requests which begin between two steps may take."""

MOST_SLOTS = 192
"""Slots at most; the other sequences are left to the leaves of trees."""

MOST_FILLED = 3
"""Rows that a step may have besides those of its trees."""

LARGEST_TREE = 256
"""Tokens kept free behind the context for the trees of a step."""

ACCEPTED_DISTANCE = 0.05
"""How far logits of a tree may be from those of its chains, as a part of the range of logits: rows round differently
beside others. Those of a wrong branch are as far apart as any two."""

log = logging.getLogger(__name__)


class Context(Protocol):
    """What `LlamaContext` is to this target."""

    vocab_size: int
    num_cells: int
    window: int
    threads: int
    what: Mapping[str, object]

    def decode(self, rows: Rows, num_logits: int) -> Tensor:
        """Compute and store rows; returns the logits of the first ones."""
        ...

    def share(self, source: int, other: int, start: int, end: int) -> None:
        """Let another sequence have what a sequence stores, too."""

    def remove(self, sequence: int, start: int = 0) -> None:
        """Take stored tokens away from a sequence."""

    def state(self, sequence: int) -> NDArray[np.uint8]:
        """A copy of what a sequence stores."""
        ...

    def set_state(self, sequence: int, state: NDArray[np.uint8]) -> bool:
        """Let an empty sequence store that."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Held:
    """The sequences of a slot; each stores all committed tokens, so that each can follow one leaf of a tree.

    `leaves` gives for each scored row (the pending token, then the nodes) the leaves below it.
    """

    sequences: list[int] = field(default_factory=list)
    leaves: list[tuple[int, ...]] = field(default_factory=list)


class LlamaTarget(Target):
    """A target on a context of llama.cpp.

    All slots share the context's cells, each token stored once for all that have it. A slot has one sequence, and
    further ones once its trees branch; while so many requests run that there would be too few, trees are single paths.
    """

    backend = "llama.cpp"

    def __init__(
        self,
        context: Context,
        config: PreTrainedConfig,
        generation_config: GenerationConfig | None = None,
        weights: Mapping[str, Any] | None = None,
        *,
        repacked: bool = False,
    ) -> None:
        self._config, self._generation_config = config, generation_config
        self._context, self._weights, self._repacked = context, weights or {}, repacked
        self.vocab_size = context.vocab_size
        self.context_length = context.num_cells - min(LARGEST_TREE, context.num_cells // 4)
        self._free = deque(range(MOST_SEQUENCES))
        self._let_go: deque[list[int]] = deque()
        self._slots = weakref.WeakSet[Held]()
        self._least = 2 if context.window else 1  # what one sequence stores alone, a sliding window may overwrite
        self._most_nodes = MOST_LEAVES  # of a tree of a request so far, which may all be leaves
        self._only_chains = False
        self._state_sizes = (0, 0)
        self._examine()

    @property
    def config(self) -> PreTrainedConfig:
        """What the file's header says."""
        return self._config

    @property
    def generation_config(self) -> GenerationConfig | None:
        """What the header, or the program that keeps the file, says about sampling and end tokens."""
        return self._generation_config

    @property
    def device(self) -> torch.device:
        """Where logits are: in main memory."""
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        """It follows trees of `MOST_LEAVES`, or chains only where its trees did not agree with their chains."""
        return Capabilities(most_leaves=1 if self._only_chains else MOST_LEAVES, fixed_memory=True)

    @property
    def threads(self) -> int:
        """Threads of every forward."""
        return self._context.threads

    def weights(self) -> Mapping[str, Any]:
        """The tensors of the file as bytes, `[bytes]` each."""
        return self._weights

    def identity(self) -> dict[str, object]:
        """What the states of its sequences depend on. Reads all weights once."""
        if self._context.window:
            raise self._saves_nothing()
        return {
            "weights": weights_digest(self._weights),
            "settings": repr(self._config.to_dict()),
            **self._context.what,
        }

    def new_slot(self) -> Slot:
        """An empty slot. Raises CapacityError when llama.cpp has no sequence left for it."""
        held = Held()
        weakref.finalize(held, self._let_go.append, held.sequences).atexit = False
        while len(held.sequences) < self._least:
            held.sequences.append(self._take())
        self._slots.add(held)
        return Slot(held, one_path=True)  # until its first step, which sees how many others there are

    def fork(self, slot: Slot, length: int, room: int = 0) -> Slot:
        """A new slot with the first `length` tokens, which both have from now on."""
        made = self.new_slot()
        for sequence in made.kv.sequences:
            self._context.share(slot.kv.sequences[0], sequence, 0, length)
        made.token_ids = slot.token_ids[:length]
        return made

    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        """Compute at most `max_tokens` more tokens of the prompt."""
        done, goal = len(slot.token_ids), len(prompt_ids) - 1
        end = min(done + max(max_tokens, 1), goal)
        self._collect()
        for start in range(done, end, BATCH):
            piece = range(start, min(start + BATCH, end))
            tokens = [prompt_ids[place] for place in piece]
            try:
                self._context.decode(Rows(tokens, piece, [slot.kv.sequences] * len(piece)), 0)
            except BaseException:
                self._cut(slot, start)
                raise
            slot.token_ids.extend(tokens)
        if end >= goal:
            slot.pending = prompt_ids[-1]
        return end >= goal

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """Logits after the pending token and after every node; views of llama.cpp's own until the next call."""
        if any(slot.pending == NOTHING_PENDING for slot, _ in batch):
            raise ValueError("a sequence without a pending token cannot be scored: finish its prefill first")
        self._collect()
        for slot, _ in batch:
            self.discard(slot)
        try:
            parts = [self._rows(slot, tree) for slot, tree in batch]
            found: list[Tensor] = []
            groups = list(batches(parts, BATCH))
            for group in groups:
                rows = _joined(group)
                logits = self._context.decode(self._filled(rows), len(rows))
                logits = logits if len(groups) == 1 else logits.clone()
                found += [logits] if len(group) == 1 else logits.split([len(rows) for rows in group])
        except BaseException:
            for slot, _ in batch:
                self.discard(slot)
            raise
        return found

    def _rows(self, slot: Slot, tree: CandidateTree) -> Rows:
        """The pending token and the nodes, each belonging to the sequences of the leaves below it."""
        held, length = slot.kv, len(slot.token_ids)
        inner = {*tree.parents}
        leaves = [node for node in range(len(tree)) if node not in inner]
        while len(held.sequences) < len(leaves):
            new = self._take(held)
            self._context.share(held.sequences[0], new, 0, length)
            held.sequences.append(new)
        below: list[list[int]] = [[] for _ in range(len(tree) + 1)]
        for place, leaf in enumerate(leaves):
            node = leaf
            while node != ROOT:
                below[node + 1].append(place)
                node = tree.parents[node]
        below[0] = list(range(max(len(leaves), self._least)))
        positions = [length]
        for parent in tree.parents:
            positions.append(positions[parent + 1] + 1)
        if len(leaves) < self._least:
            below = [below[0]] * len(below)
        held.leaves = [tuple(places) for places in below]
        return Rows(
            [slot.pending, *tree.token_ids],
            positions,
            [[held.sequences[place] for place in places] for places in below],
        )

    def _filled(self, rows: Rows) -> Rows:
        """The rows, and further ones behind the last if that is faster.

        Kernels for repacked weights compute 16 rows at once, then 4, and the rest one by one.
        """
        count = len(rows)
        if not (self._repacked and (count % 4 == 3 or count % 16 > 12)):
            return rows
        more, last = -count % 4, rows.positions[-1]
        return Rows(
            [*rows.tokens, *rows.tokens[-1:] * more],
            [*rows.positions, *range(last + 1, last + 1 + more)],
            [*rows.sequences, *rows.sequences[-1:] * more],
        )

    def commit_all(self, batch: Sequence[Commit]) -> list[Exception | None]:
        """Give the accepted path to all sequences of its slot."""
        errors: list[Exception | None] = []
        for slot, tree, path, next_token in batch:
            try:
                accepted = [tree.token_ids[node] for node in path]
                self._keep(slot, path)
                slot.token_ids += [slot.pending, *accepted]
                slot.pending = next_token
                errors.append(None)
            except Exception as error:
                errors.append(error)
        nodes = self._most_nodes
        few = (nodes - 1) * len(batch) + SPARE > MOST_SEQUENCES - self._least * len(self._slots)
        few = few or nodes >= self._context.num_cells - self.context_length
        for slot, *_ in batch:
            slot.one_path = few or self._only_chains
        return errors

    def _keep(self, slot: Slot, path: Sequence[int]) -> None:
        held, length = slot.kv, len(slot.token_ids)
        if len(held.leaves) <= max(path, default=ROOT) + 1:
            raise ValueError("only a tree that was scored can be committed")
        end, (winner, *_) = length + 1 + len(path), held.leaves[path[-1] + 1 if path else 0]
        self._context.remove(held.sequences[winner], end)
        for place, sequence in enumerate(held.sequences):
            if place != winner:
                self._context.remove(sequence, length)
                self._context.share(held.sequences[winner], sequence, length, end)
        held.leaves = []

    def rewind(self, slot: Slot, length: int) -> int:
        """Forget all committed tokens from `length` on, and everything scored."""
        length = min(length, len(slot.token_ids))
        self._cut(slot, length)
        del slot.token_ids[length:]
        return length

    def discard(self, slot: Slot) -> None:
        """Forget everything scored but not committed."""
        if slot.kv.leaves:
            self._cut(slot, len(slot.token_ids))

    def _cut(self, slot: Slot, length: int) -> None:
        for sequence in slot.kv.sequences:
            self._context.remove(sequence, length)
        slot.kv.leaves = []

    def slot_bytes(self, slot: Slot) -> int:
        """Bytes of a slot's tokens, as if it shared none, with those of a tree that was scored."""
        return self._bytes(len(slot.token_ids) + len(slot.kv.leaves))

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, tree_tokens: int, num_rows: int = 0) -> int:
        """Bytes of a request."""
        self._most_nodes = max(self._most_nodes, tree_tokens - 1)
        return self._bytes(prompt_tokens + answer_tokens + tree_tokens + MOST_FILLED)

    def _bytes(self, num_tokens: int) -> int:
        """Bytes of so many tokens, at least a slot's share of the cells: there are not more slots than sequences."""
        share = self._context.num_cells // (MOST_SLOTS // self._least)
        return max(1 + share, min(num_tokens, self._context.num_cells)) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return max(1, self._state_sizes[1])

    @property
    def arena_bytes(self) -> int:
        """Bytes of the context's cells."""
        return self._context.num_cells * self._row_bytes

    def save(self, slot: Slot, num_tokens: int) -> list[Tensor]:
        """What llama.cpp writes of a sequence's state, `[bytes]`; of a sliding window it leaves too much out."""
        if self._context.window:
            raise self._saves_nothing()
        beside = self._take()
        try:
            self._context.share(slot.kv.sequences[0], beside, 0, num_tokens)
            return [torch.from_numpy(self._context.state(beside))]
        finally:
            self._return([beside])

    def saved_bytes(self, num_tokens: int) -> int:
        """Bytes of such a state."""
        return self._state_sizes[0] + num_tokens * self._state_sizes[1]

    def restore(self, token_ids: Sequence[int], saved: Sequence[Tensor], room: int = 0) -> Slot:
        """A new slot of these tokens.

        Raises ValueError for what is no state of as many tokens of this model, OutOfCells if it has no room.
        """
        state = saved[0].numpy() if len(saved) == 1 else np.empty(0, dtype=np.uint8)
        if state.nbytes != self.saved_bytes(len(token_ids)):
            raise ValueError(f"a state of {state.nbytes} bytes is not of this model")
        slot = self.new_slot()
        if not self._context.set_state(slot.kv.sequences[0], state):
            raise OutOfCells(f"not enough memory in llama.cpp's context for {len(token_ids)} kept tokens")
        for other in slot.kv.sequences[1:]:
            self._context.share(slot.kv.sequences[0], other, 0, len(token_ids))
        slot.token_ids.extend(token_ids)
        return slot

    def _take(self, own: Held | None = None) -> int:
        """An empty sequence; spare ones of slots that nothing was scored for are taken back for it."""
        self._collect()
        for held in self._slots if not self._free else ():
            if held is not own and not held.leaves and len(held.sequences) > self._least:
                spare, held.sequences[self._least :] = held.sequences[self._least :], []
                self._return(spare)
                break
        if not self._free:
            raise CapacityError(
                f"llama.cpp follows {MOST_SEQUENCES} sequences at most: lower max_running of EngineLimits"
            )
        return self._free.popleft()

    def _collect(self) -> None:
        """Empty the sequences of slots that are gone; they went on whichever thread."""
        while self._let_go:
            self._return(self._let_go.popleft())

    def _return(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._context.remove(sequence)
            self._free.append(sequence)

    def _examine(self) -> None:
        """Measure the size of states, and see whether a tree's rows are those of its chains.

        The chains have as many rows as the tree, since llama.cpp rounds by the number of rows (below four and above).
        """
        slot = self.new_slot()
        sizes = []
        tokens = [1 + place % (self.vocab_size - 1) for place in range(7)]
        for count in (1, 2):
            self._context.decode(Rows([tokens[count]], [count - 1], [slot.kv.sequences]), 0)
            slot.token_ids.append(tokens[count])
            sizes.append(self._context.state(slot.kv.sequences[0]).nbytes)
        self._state_sizes = (2 * sizes[0] - sizes[1], sizes[1] - sizes[0])
        slot.pending, builder = tokens[0], TreeBuilder()
        stem = builder.add_fixed(ROOT, tokens[3], "check")
        for token in tokens[4:6]:
            builder.add_fixed(stem, token, "check")
        tree = builder.build()
        (together,) = self.score([(slot, tree)])
        together = together.clone()
        self.discard(slot)
        for leaf in (1, 2):
            path, chain = tree.path_to(leaf), TreeBuilder()
            node = ROOT
            for step in path:
                node = chain.add_fixed(node, tree.token_ids[step], "check")
            chain.add_fixed(node, tokens[6], "check")
            (alone,) = self.score([(slot, chain.build())])
            rows = together[[0, *(step + 1 for step in path)]]
            alone = alone[: len(rows)]
            if not (rows - alone).abs().max() <= ACCEPTED_DISTANCE * (alone.max() - alone.min()):
                self._only_chains = True
            self.discard(slot)
        if self._only_chains:
            log.warning("llama.cpp computes trees differently from chains on this device, so single paths are drafted")


def _joined(group: Sequence[Rows]) -> Rows:
    if len(group) == 1:
        return group[0]
    return Rows(
        [token for rows in group for token in rows.tokens],
        [place for rows in group for place in rows.positions],
        [each for rows in group for each in rows.sequences],
    )


def mapped_tensors(entries: Sequence[tuple[Path, Any]]) -> dict[str, Tensor]:
    """The bytes of a file's tensors by name, read when they are looked at."""
    files = {path: np.memmap(path, dtype=np.uint8, mode="c") for path, _ in entries}
    return {one.name: torch.from_numpy(files[path][one.start : one.start + one.nbytes]) for path, one in entries}
