"""The interface to a grammar engine, so that another one can replace llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from precedent.grammar.spec import Grammar

Words = NDArray[np.int32]
"""One bit per token, the lowest bit of the first word for token 0: `[ceil(vocab_size / 32)]`."""


class TokenMatcher(Protocol):
    """The position of one answer in its grammar, beginning at the first token."""

    def allowed(self) -> Words:
        """The tokens that may follow, as a new array; end tokens are allowed only where the grammar accepts."""

    def advance(self, token_ids: Sequence[int]) -> int:
        """Consume tokens as far as the grammar can follow; returns how many it took."""

    def go_back(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` that `advance` took."""

    def forced(self) -> list[int]:
        """A sequence of tokens that must follow, each the only one its mask allows; an empty list is always valid."""


class GrammarEngine(Protocol):
    """Compiles grammars for one tokenizer."""

    name: str

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A matcher at the start of an answer. Raises UnsupportedError if the engine cannot enforce the grammar."""
