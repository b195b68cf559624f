"""An MTP head as a draft model: it scores rows that read hidden states, the target's where it has them, else its own.

Entry j of its KV cache belongs to token j + 1 and reads the hidden state of token j. The target knows that of every
committed token; behind them the head continues from its own output, as vLLM and SGLang do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import ConfigError
from precedent.target.given_states import GivenStates
from precedent.target.hidden_states import HiddenStates
from precedent.target.model import TargetModel
from precedent.target.mtp.families import family_of
from precedent.target.mtp.head import load_head
from precedent.target.slot import Slot
from precedent.tree import CandidateTree

SlotOf = Callable[[], Slot]


class HeadModel(TargetModel):
    """A head beside its target, both of which keep hidden states; every slot is bound to one of the target's."""

    def __init__(self, head: PreTrainedModel, target: TargetModel, *, feeds_back_normed: bool) -> None:
        super().__init__(head)
        self.keep_hidden_states(after_norm=feeds_back_normed)
        target.keep_hidden_states()
        self._inputs: GivenStates = head.get_input_embeddings()  # type: ignore[assignment]
        self._theirs, self._own = _kept(target), _kept(self)
        self._bound: WeakKeyDictionary[Slot, SlotOf] = WeakKeyDictionary()

    def bind(self, slot: Slot, target_slot: SlotOf) -> None:
        """From now on this slot reads the hidden states of that slot of the target."""
        self._bound[slot] = target_slot

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """As `TargetModel.score`. Rows behind the target's committed text must come one at a time."""
        self._inputs.give([self._read_by(slot, len(tree) + 1) for slot, tree in batch])
        return super().score(batch)

    def _prefill_chunk(self, slot: Slot, token_ids: Sequence[int]) -> None:
        self._inputs.give([self._read_by(slot, len(token_ids))])
        super()._prefill_chunk(slot, token_ids)

    def _read_by(self, slot: Slot, count: int) -> Tensor:
        """The hidden states that the next `count` entries of a slot read, `[count, hidden_size]`."""
        target, first = self._bound[slot](), slot.kv.length
        if first + count <= target.kv.length:
            return self._theirs.of(target.kv, first, first + count)
        assert count == 1, "a drafted token reads the output of the one before it"
        return self._own.of(slot.kv, first - 1, first)


def head_beside(target: TargetModel, *, draws_ahead: bool) -> HeadModel:
    """The head in a target's checkpoint, ready to draft; the target keeps hidden states from now on.

    Raises ConfigError where there is none, or where a draft model draws ahead of the target; UnsupportedError and
    ModelLoadError where the head cannot be used, each naming the reason.
    """
    if draws_ahead:
        raise ConfigError(
            "mtp reads the target's hidden states between two steps, and pearl draws while the target scores: set "
            "pearl=False, or leave mtp out of the drafters"
        )
    family = family_of(target.model.config.get_text_config())
    target.keep_hidden_states()  # before anything is read: it may be refused
    head = load_head(target.model, family)
    return HeadModel(head, target, feeds_back_normed=family.feeds_back_normed)


def _kept(model: TargetModel) -> HiddenStates:
    assert model.runner.hidden is not None
    return model.runner.hidden
