"""The models that draft beside an engine's target: a draft model, and the MTP head of the target's checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from precedent.config import SpeculationConfig
from precedent.decoding.pearl import Pearl, pearl_for
from precedent.target import TargetModel
from precedent.target.load.draft_for import draft_for
from precedent.target.mtp.model import HeadModel, head_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_MODEL, MTP = "draft-model", "mtp"
"""The drafters whose models store keys and values beside the target's."""


@dataclass(frozen=True, slots=True)
class DraftModels:
    """The draft model, whether it is the target's own first layers, whether it draws ahead; and the MTP head."""

    draft: TargetModel | None
    early_exit: bool
    pearl: Pearl | None
    head: HeadModel | None

    @classmethod
    def beside(
        cls, target: TargetModel, draft_model: PreTrainedModel | None, pearl: bool | None, drafters: Collection[str]
    ) -> Self:
        """Prepare the models of these drafters. Raises what `draft_for`, `pearl_for` and `head_beside` raise."""
        draft, early_exit = draft_for(target, draft_model)
        ahead = pearl_for(draft, target, pearl, early_exit=early_exit)
        head = head_beside(target, draws_ahead=ahead is not None) if MTP in drafters else None
        return cls(draft, early_exit, ahead, head)

    def kv_bytes(
        self, drafters: Collection[str], prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig
    ) -> int:
        """The most bytes of keys and values that a request takes in these models, beyond those in an arena."""
        tree, num_bytes = speculation.max_nodes + speculation.max_draws + 1, 0
        if self.draft is not None and self.draft.static is None and not self.early_exit and DRAFT_MODEL in drafters:
            ahead = speculation.max_draws + 1 if self.pearl is not None else 0
            num_bytes += self.draft.request_bytes(prompt_tokens, answer_tokens, tree + ahead, 1)
        if self.head is not None and MTP in drafters:
            num_bytes += self.head.request_bytes(prompt_tokens, answer_tokens, tree, 1)
        return num_bytes
