"""A head as a draft model: it scores rows that read its target's states where there are some, else its own output.

Entry j of its KV cache belongs to token j + 1 and reads what the target computed of token j. The target knows that of
every committed token; behind them the head continues from its own output, as vLLM and SGLang do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.target.contract import Slot
from precedent.target.given_states import GivenStates
from precedent.target.kv.cache import KVCache
from precedent.target.model import TargetModel
from precedent.tree import CandidateTree

SlotOf = Callable[[], Slot]

StatesOf = Callable[[KVCache, int, int], Tensor]
"""What a head reads of a target's tokens, from one up to another: `[tokens, hidden_size]`."""


class HeadModel(TargetModel):
    """A head beside its target, whose states `read` gives; every slot is bound to one of the target's.

    The head's embeddings are `GivenStates`. It keeps its own output, after its final norm if it `feeds_back_normed`.
    """

    def __init__(self, head: PreTrainedModel, read: StatesOf, *, feeds_back_normed: bool) -> None:
        super().__init__(head)
        own = self.keep_hidden_states(after_norm=feeds_back_normed)
        self._inputs: GivenStates = head.get_input_embeddings()  # type: ignore[assignment]
        self._read, self._own = read, own
        self._bound: WeakKeyDictionary[Slot, SlotOf] = WeakKeyDictionary()

    def bind(self, slot: Slot, target_slot: SlotOf) -> None:
        """From now on this slot reads the states of that slot of the target."""
        self._bound[slot] = target_slot

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """As `TargetModel.score`. Rows behind the target's committed text must come one at a time."""
        self._inputs.give([self._read_by(slot, len(tree) + 1) for slot, tree in batch])
        return super().score(batch)

    def _prefill_chunk(self, slot: Slot, token_ids: Sequence[int]) -> None:
        self._inputs.give([self._read_by(slot, len(token_ids))])
        super()._prefill_chunk(slot, token_ids)

    @torch.inference_mode()
    def _read_by(self, slot: Slot, count: int) -> Tensor:
        """The states that the next `count` entries of a slot read, `[count, hidden_size]`."""
        target, first = self._bound[slot](), slot.kv.length
        if first + count <= target.kv.length:
            return self._read(target.kv, first, first + count)
        assert count == 1, "a drafted token reads the output of the one before it"
        return self._own.of(slot.kv, first - 1, first)


def reading_hidden_states(head: PreTrainedModel, target: TargetModel, *, feeds_back_normed: bool) -> HeadModel:
    """A head that reads its target's final hidden states, which the target keeps from now on.

    Raises UnsupportedError, naming why, where they cannot be kept.
    """
    return HeadModel(head, target.keep_hidden_states().of, feeds_back_normed=feeds_back_normed)
