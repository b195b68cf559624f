"""The models that draft beside an engine's target: a draft model, block draft or EAGLE head, and its own MTP head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from precedent.config import SpeculationConfig
from precedent.decoding.pearl import Pearl, pearl_for
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.block.draft import BlockDraft
from precedent.target.block.model import BlockModel
from precedent.target.eagle.head import EagleHead
from precedent.target.eagle.model import eagle_beside
from precedent.target.head_model import HeadModel, reading_hidden_states
from precedent.target.load.conditioned import reads_hidden_states
from precedent.target.load.draft_for import draft_for
from precedent.target.mtp.model import head_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_MODEL, BLOCK_DRAFT, EAGLE, MTP = "draft-model", "block-draft", "eagle", "mtp"
"""The drafters whose models store keys and values beside the target's."""


def proposed_by(draft_model: PreTrainedModel | None) -> str:
    """The name of the drafter that a draft model belongs to."""
    if isinstance(draft_model, BlockDraft):
        return BLOCK_DRAFT
    return EAGLE if isinstance(draft_model, EagleHead) else DRAFT_MODEL


@dataclass(frozen=True, slots=True)
class DraftModels:
    """The draft model, whether it is the target's first layers, whether it draws ahead; the others' models."""

    draft: TargetModel | None
    early_exit: bool
    pearl: Pearl | None
    head: HeadModel | None
    block: BlockModel | None = None
    eagle: HeadModel | None = None

    @classmethod
    def beside(
        cls, target: TargetModel, draft_model: PreTrainedModel | None, pearl: bool | None, drafters: Collection[str]
    ) -> Self:
        """Prepare the models of these drafters. Raises what `draft_for`, `pearl_for` and `head_beside` raise."""
        block, eagle = _reading(target, draft_model, pearl, drafters)
        draft: TargetModel | None = None
        early_exit, ahead = False, None
        if draft_model is not None and reads_hidden_states(draft_model):
            draft = _conditioned_beside(target, draft_model, pearl, drafters)
        elif not isinstance(draft_model, BlockDraft | EagleHead):
            draft, early_exit = draft_for(target, draft_model)
            ahead = pearl_for(draft, target, pearl, early_exit=early_exit)
        head = head_beside(target, draws_ahead=ahead is not None) if MTP in drafters else None
        return cls(draft, early_exit, ahead, head, block, eagle)

    def kv_bytes(
        self, drafters: Collection[str], prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig
    ) -> int:
        """The most bytes of keys and values that a request takes in these models, beyond those in an arena."""
        tree, num_bytes = speculation.max_nodes + speculation.max_draws + 1, 0
        if self.draft is not None and self.draft.arena is None and not self.early_exit and DRAFT_MODEL in drafters:
            ahead = speculation.max_draws + 1 if self.pearl is not None else 0
            num_bytes += self.draft.request_bytes(prompt_tokens, answer_tokens, tree + ahead, 1)
        if self.head is not None and MTP in drafters:
            num_bytes += self.head.request_bytes(prompt_tokens, answer_tokens, tree, 1)
        if self.eagle is not None and EAGLE in drafters:
            num_bytes += self.eagle.request_bytes(prompt_tokens, answer_tokens, tree, 1)
        if self.block is not None and BLOCK_DRAFT in drafters:
            num_bytes += self.block.kv_bytes(prompt_tokens, answer_tokens)
        return num_bytes


def _reading(
    target: TargetModel, draft: PreTrainedModel | None, pearl: bool | None, drafters: Collection[str]
) -> tuple[BlockModel | None, HeadModel | None]:
    """The block draft or the EAGLE head, None where no drafter uses it. Raises ConfigError beside pearl."""
    if pearl and isinstance(draft, BlockDraft):
        raise ConfigError("pearl=True is for a draft model that draws token after token, and this is a block draft")
    if pearl and isinstance(draft, EagleHead):
        raise ConfigError(
            "an EAGLE head reads the target's states between two steps, and pearl draws while the target scores: set "
            "pearl=False"
        )
    block = BlockModel(draft, target) if isinstance(draft, BlockDraft) and BLOCK_DRAFT in drafters else None
    eagle = eagle_beside(draft, target) if isinstance(draft, EagleHead) and EAGLE in drafters else None
    return block, eagle


def _conditioned_beside(
    target: TargetModel, draft: PreTrainedModel, pearl: bool | None, drafters: Collection[str]
) -> HeadModel | None:
    """A draft that reads its target, None where no drafter uses it. Raises UnsupportedError beside pearl."""
    if pearl:
        raise UnsupportedError(
            "pearl=True lets a draft model draw while the target scores, and this one reads the target's hidden states "
            "between two steps: leave pearl out, or train a draft without --condition target"
        )
    return reading_hidden_states(draft, target, feeds_back_normed=True) if DRAFT_MODEL in drafters else None
