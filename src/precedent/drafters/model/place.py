"""Where a draft model keeps a request's keys and values: in its own KV cache, or in the target's.

Every place catches up with the text before a draw; None says that it has nothing to draw from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from precedent.target import Slot, TargetModel, common_prefix
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE, CandidateTree, chain

CATCH_UP_LIMIT = 32
"""Up to this many missed tokens are computed with the first draw; more are prefilled in chunks."""

SlotOf = Callable[[], Slot]
"""Returns a request's slot in the target model."""


class Place(Protocol):
    """Where one request's keys and values go."""

    @property
    def behind(self) -> int:
        """Number of committed tokens that the KV cache lacks."""

    def caught_up(self, drafted: Sequence[int]) -> tuple[Slot, CandidateTree] | None:
        """Catch up with the text and the drafted tokens; None where there is nothing to draw from."""

    def leave(self) -> None:
        """Let go of the request's keys and values."""


class OwnPlace:
    """The draft model's own KV cache, which catches up with the committed text on demand."""

    def __init__(self, model: TargetModel, pool: PrefixPool, tenant: str, context: list[int]) -> None:
        self._model, self._pool, self._tenant, self._context = model, pool, tenant, context
        self._slot = pool.acquire(tenant, self._text())

    @property
    def behind(self) -> int:
        """Number of committed tokens that the KV cache lacks."""
        return len(text := self._text()) - common_prefix(self._slot.token_ids, text)

    def caught_up(self, drafted: Sequence[int]) -> tuple[Slot, CandidateTree] | None:
        """Rewind to the committed text plus the drafted tokens.

        The first missing token becomes pending; the others are returned as a chain.
        """
        slot, text = self._slot, [*self._text(), *drafted]
        reused = self._model.rewind(slot, common_prefix(slot.token_ids, text[:-1]))
        if len(text) - reused > CATCH_UP_LIMIT and not self._model.encodes_prompt:
            self._model.prefill(slot, text)
        slot.pending, *missed = text[len(slot.token_ids) :]
        return slot, chain(missed)

    def leave(self) -> None:
        """Keep the KV cache for the conversation's next turn."""
        slot, self._slot = self._slot, self._model.new_slot()
        self._pool.release(self._tenant, slot)

    def _text(self) -> list[int]:
        return self._context


class DecoderPlace(OwnPlace):
    """The KV cache of an encoder-decoder draft model, of one prompt, which its encoder reads at the first draw."""

    def __init__(self, model: TargetModel, context: list[int]) -> None:
        self._model, self._context, self._num_prompt = model, context, len(context)
        self._slot, self._is_read = model.new_slot(), False

    @property
    def behind(self) -> int:
        """Number of tokens to compute, those of a prompt that has not been read yet included."""
        return super().behind if self._is_read else len(self._context)

    def caught_up(self, drafted: Sequence[int]) -> tuple[Slot, CandidateTree] | None:
        """Rewind to the committed answer plus the drafted tokens."""
        if not self._is_read:
            self._model.prefill(self._slot, self._context[: self._num_prompt])
            self._is_read = True
        return super().caught_up(drafted)

    def leave(self) -> None:
        """Drop the KV cache."""
        self._slot, self._is_read = self._model.new_slot(), False

    def _text(self) -> list[int]:
        return [*self._model.answer_start, *self._context[self._num_prompt :]]


class TargetsPlace:
    """The first layers of the target's own KV cache; there is never anything to catch up on."""

    behind = 1

    def __init__(self, model: TargetModel, target_slot: SlotOf) -> None:
        self._num_layers, self._target_slot = len(model.kv_shape.layers), target_slot

    def caught_up(self, drafted: Sequence[int]) -> tuple[Slot, CandidateTree]:
        """The committed text as the target holds it, with its pending token; drafted tokens are not stored there."""
        assert not drafted, "an early exit drafts between two forwards of its target, never ahead"
        slot = self._target_slot()
        return Slot(slot.kv.first_layers(self._num_layers), pending=slot.pending), EMPTY_TREE

    def leave(self) -> None:
        """Do nothing: the engine keeps the target's slot."""
