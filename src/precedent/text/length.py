"""Whether a text is too long for a model, seen from its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precedent.errors import ContextOverflowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 8
"""Twice what English has: a text of so many may fit, one of more is looked at from its beginning first."""

CUT = 1.1
"""A beginning is too long with this many times the tokens that fit, since cutting a word may give it a few more."""


def check_length(tokenizer: PreTrainedTokenizerBase, text: str, context_length: int) -> None:
    """Refuse a text of far too many tokens without encoding all of it, which takes seconds and gigabytes.

    `context_length` is in tokens. A text that passes may still be too long by a little. Raises ContextOverflowError.
    """
    length = CHARACTERS_PER_TOKEN * context_length
    while length < len(text):
        if len(tokenizer.encode(text[:length], add_special_tokens=False)) > CUT * context_length:
            raise ContextOverflowError(
                f"the prompt has {len(text)} characters and more than {context_length} tokens, which is what the "
                "model's context holds: shorten the conversation or the tool results"
            )
        length *= 2
