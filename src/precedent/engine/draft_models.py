"""The models that draft beside an engine's target: a draft model or block draft, and the target's MTP head."""

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
from precedent.target.load.conditioned import reads_hidden_states
from precedent.target.load.draft_for import draft_for
from precedent.target.mtp.model import HeadModel, head_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_MODEL, BLOCK_DRAFT, MTP = "draft-model", "block-draft", "mtp"
"""The drafters whose models store keys and values beside the target's."""


@dataclass(frozen=True, slots=True)
class DraftModels:
    """The draft model, whether it is the target's first layers, whether it draws ahead; MTP head and block draft."""

    draft: TargetModel | None
    early_exit: bool
    pearl: Pearl | None
    head: HeadModel | None
    block: BlockModel | None = None

    @classmethod
    def beside(
        cls, target: TargetModel, draft_model: PreTrainedModel | None, pearl: bool | None, drafters: Collection[str]
    ) -> Self:
        """Prepare the models of these drafters. Raises what `draft_for`, `pearl_for` and `head_beside` raise."""
        draft: TargetModel | None = None
        block, early_exit, ahead = None, False, None
        if isinstance(draft_model, BlockDraft):
            block = _block_beside(target, draft_model, pearl, drafters)
        elif draft_model is not None and reads_hidden_states(draft_model):
            draft = _conditioned_beside(target, draft_model, pearl, drafters)
        else:
            draft, early_exit = draft_for(target, draft_model)
            ahead = pearl_for(draft, target, pearl, early_exit=early_exit)
        head = head_beside(target, draws_ahead=ahead is not None) if MTP in drafters else None
        return cls(draft, early_exit, ahead, head, block)

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
        if self.block is not None and BLOCK_DRAFT in drafters:
            num_bytes += self.block.kv_bytes(answer_tokens)
        return num_bytes


def _block_beside(
    target: TargetModel, draft: BlockDraft, pearl: bool | None, drafters: Collection[str]
) -> BlockModel | None:
    """The block draft, None where no drafter uses it. Raises ConfigError beside pearl."""
    if pearl:
        raise ConfigError("pearl=True is for a draft model that draws token after token, and this is a block draft")
    return BlockModel(draft, target) if BLOCK_DRAFT in drafters else None


def _conditioned_beside(
    target: TargetModel, draft: PreTrainedModel, pearl: bool | None, drafters: Collection[str]
) -> HeadModel | None:
    """A draft that reads its target, None where no drafter uses it. Raises UnsupportedError beside pearl."""
    if pearl:
        raise UnsupportedError(
            "pearl=True lets a draft model draw while the target scores, and this one reads the target's hidden states "
            "between two steps: leave pearl out, or train a draft without --condition target"
        )
    return HeadModel(draft, target, feeds_back_normed=True) if DRAFT_MODEL in drafters else None
