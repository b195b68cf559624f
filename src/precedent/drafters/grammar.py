"""The drafter of what must follow: tokens that the request's constraint leaves no alternative to."""

from __future__ import annotations

from collections.abc import Sequence

from precedent.drafters.base import Candidates, DraftRequest
from precedent.sampling.constraints import forced_tokens
from precedent.sampling.probabilities import Coins
from precedent.tree import TreeBuilder

_CERTAIN = 0.999
_MAX_BIN = 15


class GrammarDrafter:
    """Proposes forced tokens; idle for requests whose constraint forces none. Nothing is shared between requests."""

    name = "grammar"
    draws = False

    def begin(self, request: DraftRequest) -> GrammarDrafting:
        """Start with an empty answer."""
        return GrammarDrafting(self.name, request)

    def close(self) -> None:
        """Nothing is shared between requests."""


class GrammarDrafting:
    """One live output under one constraint."""

    behind = 0

    def __init__(self, source: str, request: DraftRequest) -> None:
        self._source, self._shape, self._end_ids = source, request.shape, request.end_token_ids
        self._output: list[int] = []

    def match(self, budget: int) -> Candidates:
        """The forced tokens as a chain, up to one that ends the answer."""
        if self._shape is None or budget <= 0:
            return Candidates(self._source)
        forced = _until_end(forced_tokens(self._shape, self._output)[:budget], self._end_ids)
        nodes = [(token, depth - 1, _CERTAIN, min(depth, _MAX_BIN)) for depth, token in enumerate(forced)]
        return Candidates.of(self._source, nodes)

    def draw(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> None:
        """Nothing: what is forced is not drawn."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """The output grew."""
        self._output += token_ids

    def end(self) -> None:
        """Let go of the constraint; afterwards nothing is proposed."""
        self._shape, self._output = None, []


def _until_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> Sequence[int]:
    """The tokens up to the first that ends the answer, included."""
    for count, token in enumerate(token_ids, start=1):
        if token in end_ids:
            return token_ids[:count]
    return token_ids
