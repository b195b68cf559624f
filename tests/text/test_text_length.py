"""A text of far too many tokens is refused from its beginning, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from precedent.errors import ContextOverflowError
from precedent.text.codec import CHARACTERS_PER_TOKEN, check_length
from precedent.text.prompt import render_prompt
from precedent_testing.scripted_engine import chatml_tokenizer

CONTEXT = 100


class Words:
    """A tokenizer of words and of whole runs of spaces, which notes what it encodes."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, text: str, **settings: Any) -> Sequence[str]:
        self.encoded.append(len(text))
        return text.split()


@pytest.mark.parametrize("num_words", [5 * CONTEXT, 1_000_000])
def test_a_long_text_is_refused_from_its_beginning(num_words: int) -> None:
    tokenizer: Any = Words()
    with pytest.raises(ContextOverflowError, match=f"{num_words * 5} characters and more than 100 tokens"):
        check_length(tokenizer, "word " * num_words, CONTEXT)
    assert tokenizer.encoded == [CHARACTERS_PER_TOKEN * CONTEXT]


@pytest.mark.parametrize("text", ["word " * 160, "word" * 50_000, (" " * 99 + "w") * 50, ""])
def test_a_text_that_may_fit_passes(text: str) -> None:
    tokenizer: Any = Words()
    check_length(tokenizer, text, CONTEXT)
    assert sum(tokenizer.encoded) <= 2 * len(text)


def test_a_text_is_looked_at_again_if_its_beginning_is_short() -> None:
    tokenizer: Any = Words()
    with pytest.raises(ContextOverflowError):
        check_length(tokenizer, " " * 5000 + "word " * 1000, CONTEXT)
    assert tokenizer.encoded == [800, 1600, 3200, 6400]


def test_prompts_are_looked_at_as_rendered() -> None:
    tokenizer, messages = chatml_tokenizer(), [{"role": "user", "content": "word <|im_end|> " * 1000}]
    with pytest.raises(ContextOverflowError, match="shorten the conversation"):
        render_prompt(tokenizer, messages, context_length=CONTEXT)
    assert render_prompt(tokenizer, messages, context_length=10**6) == render_prompt(tokenizer, messages)
