"""A language model that is a table: the shape of `TargetModel` at the price of a look-up, for tests that sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from precedent.target import common_prefix
from precedent.tree import ROOT, CandidateTree


class NothingStored:
    """Keys and values of a table: there are none, and no pool keeps them."""

    nbytes = sys.maxsize

    def mark(self) -> None:
        """Nothing to take a snapshot of."""

    def nearest(self, length: int) -> int:
        """Every length can be gone back to."""
        return length


@dataclass(slots=True, eq=False, weakref_slot=True)
class TabledSlot:
    """One sequence: committed tokens and the pending one, nothing computed."""

    kv: ClassVar = NothingStored()
    one_path: ClassVar = False
    token_ids: list[int] = field(default_factory=list)
    pending: int = -1


class TabledModel:
    """Answers with `logits_of(token_ids)` `[vocab_size]`, asked once for each context."""

    device = torch.device("cpu")

    runner = SimpleNamespace(threads=1, hidden=None, settled=True)
    encodes_prompt = False

    def __init__(self, logits_of: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._logits_of = logits_of
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def new_slot(self) -> TabledSlot:
        """An empty slot."""
        return TabledSlot()

    def fork(self, slot: TabledSlot, length: int, room: int = 0) -> TabledSlot:
        """A new slot with the first `length` tokens."""
        return TabledSlot(slot.token_ids[:length])

    def prefill(self, slot: TabledSlot, prompt_ids: Sequence[int]) -> int:
        """Bring `slot` to `prompt_ids`, the last one pending; returns how many tokens it held already."""
        reused = common_prefix(slot.token_ids, prompt_ids[:-1])
        slot.token_ids, slot.pending = list(prompt_ids[:-1]), prompt_ids[-1]
        return reused

    def score(self, batch: Sequence[tuple[TabledSlot, CandidateTree]]) -> list[Tensor]:
        """Logits after the pending token and after every node, `[num_nodes + 1, vocab_size]` for each sequence."""
        return [self._score((*slot.token_ids, slot.pending), tree) for slot, tree in batch]

    def commit(self, slot: TabledSlot, tree: CandidateTree, path: Sequence[int], next_token: int) -> None:
        """Keep the pending token and the accepted `path`; `next_token` becomes pending."""
        slot.token_ids += [slot.pending, *(tree.token_ids[node] for node in path)]
        slot.pending = next_token

    def commit_all(
        self, batch: Sequence[tuple[TabledSlot, CandidateTree, Sequence[int], int]]
    ) -> list[Exception | None]:
        """`commit` for several sequences, of which none can fail."""
        for verdict in batch:
            self.commit(*verdict)
        return [None] * len(batch)

    def rewind(self, slot: TabledSlot, length: int) -> int:
        """Forget all committed tokens from `length` on; returns how many remain."""
        del slot.token_ids[length:]
        return length

    def discard(self, slot: TabledSlot) -> None:
        """Nothing was kept."""

    def _score(self, context: tuple[int, ...], tree: CandidateTree) -> Tensor:
        rows = [self._row((*context, *tree.tokens_to(node))) for node in range(ROOT, len(tree))]
        return torch.stack(rows)

    def _row(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._rows:
            self._rows[context] = self._logits_of(context)
        return self._rows[context]
