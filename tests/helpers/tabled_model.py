"""A language model that is a table: the contract `Target` at the price of a look-up, for tests that sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from precedent.target import Capabilities, Slot, Target
from precedent.target.contract import NOTHING_PENDING, Commit
from precedent.tree import ROOT, CandidateTree


class NothingStored:
    """Keys and values of a table: there are none."""

    def mark(self) -> None:
        """Nothing to take a snapshot of."""


class TabledModel(Target):
    """Answers with `logits_of(token_ids)` `[vocab_size]`, asked once for each context."""

    config, generation_config, device = PreTrainedConfig(), None, torch.device("cpu")
    capabilities, vocab_size, context_length = Capabilities(), 0, 1 << 20

    def __init__(self, logits_of: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._logits_of = logits_of
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        return {}

    def new_slot(self) -> Slot:
        return Slot(NothingStored())

    def fork(self, slot: Slot, length: int, room: int = 0) -> Slot:
        return Slot(slot.kv, slot.token_ids[:length])

    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        slot.token_ids, slot.pending = list(prompt_ids[:-1]), prompt_ids[-1]
        return True

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        if any(slot.pending == NOTHING_PENDING for slot, _ in batch):
            raise ValueError("a sequence without a pending token cannot be scored")
        return [self._score((*slot.token_ids, slot.pending), tree) for slot, tree in batch]

    def commit_all(self, batch: Sequence[Commit]) -> list[Exception | None]:
        errors: list[Exception | None] = [None] * len(batch)
        for place, (slot, tree, path, next_token) in enumerate(batch):
            try:
                slot.token_ids += [slot.pending, *(tree.token_ids[node] for node in path)]
                slot.pending = next_token
            except IndexError as error:
                errors[place] = error
        return errors

    def rewind(self, slot: Slot, length: int) -> int:
        del slot.token_ids[length:]
        return length

    def discard(self, slot: Slot) -> None:
        """Nothing was kept."""

    def slot_bytes(self, slot: Slot) -> int:
        return sys.maxsize  # so that no pool keeps it

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, tree_tokens: int, num_rows: int = 0) -> int:
        return 0

    def _score(self, context: tuple[int, ...], tree: CandidateTree) -> Tensor:
        rows = [self._row((*context, *tree.tokens_to(node))) for node in range(ROOT, len(tree))]
        return torch.stack(rows)

    def _row(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._rows:
            self._rows[context] = self._logits_of(context)
        return self._rows[context]
