"""The drafter whose model reads its target's states: trained with `--condition target`, an MTP or EAGLE head.

It draws as a draft model does, one chain per step, so that sampling stays exact (`drafters.model.drafter`).
"""

from __future__ import annotations

from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.model.place import HeadPlace
from precedent.drafters.request import Request
from precedent.errors import ConfigError
from precedent.target.head_model import HeadModel


class ConditionedDrafter(DraftModelDrafter):
    """Shares one model between all requests; each has its own KV cache of its layers, beside that of the target."""

    def __init__(self, head: HeadModel) -> None:
        super().__init__(head)
        self._head = head

    def _place_of(self, request: Request, context: list[int]) -> HeadPlace:
        """A KV cache beside the request's slot in the target. Raises ConfigError for a request without one."""
        if request.target_slot is None:
            raise ConfigError(
                f"{self.name} reads the hidden states of its target, and this request names no target_slot"
            )
        return HeadPlace(self._head, self._pool, request.tenant, context, request.target_slot)
