"""How models mark their reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning."""

    open: str
    close: str


REASONING = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|channel>thought\n", "<channel|>"),
)
"""Qwen 3, DeepSeek-R1 and SmolLM3; Magistral; Gemma 4."""


def reasoning_tags(tokenizer: PreTrainedTokenizerBase, template: str) -> ReasoningTags | None:
    """Find the reasoning tags in the chat template or among the tokenizer's added tokens; None if there are none."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((tags for tags in REASONING if tags.close in template or tags.close in added), None)
