"""The seam to a grammar engine: what Precedent asks of one, so that another can take llguidance's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from precedent.grammar.spec import Grammar

Words = NDArray[np.int32]
"""One bit per token, the lowest bit of the first word for token 0: `[ceil(vocab_size / 32)]`."""


class TokenMatcher(Protocol):
    """Where one answer stands in its grammar; it starts at the first token."""

    def allowed(self) -> Words:
        """The tokens that may follow, a new array; end tokens only where the grammar accepts."""

    def advance(self, token_ids: Sequence[int]) -> int:
        """Go on by these tokens as far as the grammar can follow; returns how many it took."""

    def go_back(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` that `advance` took."""

    def forced(self) -> list[int]:
        """Tokens that must follow one after the other, each alone in its mask; an empty list is always right."""


class GrammarEngine(Protocol):
    """Compiles grammars for one tokenizer."""

    name: str

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A matcher at the start of an answer. Raises UnsupportedError for what the engine cannot enforce."""
