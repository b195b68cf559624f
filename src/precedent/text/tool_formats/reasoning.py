"""How models mark what they think before they answer."""

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
    """The tags that the chat template reads or writes, or that the tokenizer knows; None for a model without any."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((tags for tags in REASONING if tags.close in template or tags.close in added), None)
