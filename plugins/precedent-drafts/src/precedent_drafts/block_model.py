"""Runs a block draft: keeps its keys and values of each request's text, and fills blocks for several at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from precedent.drafters.model.place import SlotOf
from precedent.errors import ConfigError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Rows, chain_rows
from precedent.target.model import TargetModel
from precedent_drafts.block_draft import BlockDraft

CHUNK = 512
"""Tokens of a text whose keys and values are computed at once."""


@dataclass(slots=True)
class BlockPlace:
    """A request's keys and values in the draft, of its text from token `first` on."""

    target_slot: SlotOf
    first: int
    kv: KVCache

    @property
    def behind(self) -> int:
        """Committed tokens whose keys and values are missing."""
        committed: int = self.target_slot().kv.length
        return max(0, committed - self.first - self.kv.length)


@dataclass(frozen=True, slots=True)
class Filled:
    """A filled block: `logits` `[block_size, num_head_tokens]` and the `confidence` `[block_size]` in (0, 1).

    Row k is the draft's belief about token k behind the last one, whatever stands between them. Without a Markov term
    the logits stay on the draft's device: they are as wide as a whole vocabulary.
    """

    logits: Tensor
    confidence: Tensor


class BlockModel:
    """A block draft beside its target, which from now on keeps the outputs of the layers that the draft reads, if any.

    Raises ConfigError for layers that the target lacks, and UnsupportedError where they cannot be kept.
    """

    def __init__(self, draft: BlockDraft, target: TargetModel) -> None:
        self.draft, self.settings = draft, draft.settings
        self._outputs = target.keep_layer_outputs(self.settings.reads) if self.settings.reads else None
        self._rows = TargetModel(draft)
        if self._rows.one_path:
            raise ConfigError("the layers of this block draft follow single paths, so no block can be filled")
        self._columns = torch.full((draft.inputs.mask_id,), draft.head.token_ids.numel())
        self._columns[draft.head.token_ids.cpu()] = torch.arange(draft.head.token_ids.numel())
        self._dtype = torch.float64 if draft.dtype == torch.float64 else torch.float32
        self._place = torch.device("cpu") if self.settings.markov_rank else draft.device
        self.left = draft.markov.left.detach().to(self._place, self._dtype)
        self.right = draft.markov.right.detach().to(self._place, self._dtype)
        self.token_ids = draft.head.token_ids.cpu()

    def kv_bytes(self, prompt_tokens: int, answer_tokens: int) -> int:
        """The most bytes that a request takes in the draft's KV cache."""
        settings = self.settings
        context = min(prompt_tokens, settings.context_tokens)
        return self._rows.kv_bytes(context + answer_tokens + settings.block_size + 1)

    def place_beside(self, target_slot: SlotOf, prompt_tokens: int) -> BlockPlace:
        """Where a request's text is read from its last `context_tokens` prompt tokens on; computes nothing yet."""
        first = max(0, prompt_tokens - 1 - self.settings.context_tokens)
        return BlockPlace(target_slot, first, self._rows.new_slot().kv)

    def links(self, before: int) -> Tensor:
        """What the Markov term adds to the row behind the token `before`, `[num_head_tokens]`."""
        added: Tensor = self.left[self._columns[before]] @ self.right
        return added

    def catch_up(self, place: BlockPlace) -> None:
        """Compute the keys and values of committed tokens that are missing."""
        slot = place.target_slot()  # a request's slot only grows
        while place.behind:
            start = place.first + place.kv.length
            end = min(slot.kv.length, start + CHUNK)
            place.kv.reserve(end - place.first + self.settings.block_size + 1)
            if self._outputs is None:
                self._rows.runner.fill(chain_rows(place.kv, slot.token_ids[start:end]))
            else:
                self._write(place.kv, self._outputs.of(slot.kv, start, end))
            place.kv.keep(range(end - start))

    def _write(self, kv: KVCache, states: Tensor) -> None:
        """Write keys and values behind those in `kv`, from what the target saw of these tokens."""
        pairs = self.draft.keys_and_values(states.to(self.draft.device), kv.length)
        for index, (keys, values) in enumerate(pairs):
            kv.layer(index).write(keys, values)

    @torch.inference_mode()
    def fill(self, batch: Sequence[tuple[BlockPlace, int]]) -> list[Filled]:
        """Fill a block behind the last token of each text, `settings.iterations` forwards for all together."""
        for place, _ in batch:
            self.catch_up(place)
        tokens = [[last, *[self.draft.inputs.mask_id] * self.settings.block_size] for _, last in batch]
        filled = self._forward([place for place, _ in batch], tokens)
        for done in range(1, self.settings.iterations):
            for row, each in zip(tokens, filled, strict=True):
                self._unmask(row, each, done)
            again = self._forward([place for place, _ in batch], tokens)
            filled = [self._merged(row, *pair) for row, *pair in zip(tokens, filled, again, strict=True)]
        return filled

    def _forward(self, places: Sequence[BlockPlace], tokens: Sequence[Sequence[int]]) -> list[Filled]:
        count = self.settings.block_size + 1
        depths, all_see_all = np.arange(count), np.ones((count, count), dtype=np.bool_)
        rows = [
            Rows(place.kv, row, depths, all_see_all, causal_in_windows=True)
            for place, row in zip(places, tokens, strict=True)
        ]
        found = [logits[1:].to(self._place, self._dtype) for logits in self._rows.runner.logits(rows)]
        return [Filled(logits[:, :-1], logits[:, -1].sigmoid().cpu()) for logits in found]

    def _unmask(self, row: list[int], filled: Filled, done: int) -> None:
        """Put likeliest tokens where the draft is surest, so that `done / iterations` of the block is known."""
        masked = [k for k in range(self.settings.block_size) if row[k + 1] == self.draft.inputs.mask_id]
        count = -(-self.settings.block_size * done // self.settings.iterations)
        chances, best = filled.logits.softmax(-1).max(-1)
        surest = sorted(masked, key=lambda k: -float(chances[k]))
        for k in surest[: count - (self.settings.block_size - len(masked))]:
            row[k + 1] = int(self.token_ids[int(best[k])])

    def _merged(self, row: Sequence[int], before: Filled, now: Filled) -> Filled:
        """What the draft believed of a position while it was still masked."""
        masked = torch.tensor([token == self.draft.inputs.mask_id for token in row[1:]])
        return Filled(
            torch.where(masked[:, None].to(self._place), now.logits, before.logits),
            torch.where(masked, now.confidence, before.confidence),
        )
