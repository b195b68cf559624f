"""The drafter of forced tokens: those that the request's constraint leaves no alternative to."""

from __future__ import annotations

from collections.abc import Sequence

from precedent.drafters.base import Candidates, Drafter
from precedent.drafters.request import Request
from precedent.sampling.row_shaper import forced_tokens

_CERTAIN = 0.999
_MAX_BIN = 15


class GrammarDrafter(Drafter):
    """Proposes forced tokens, or nothing if the request's constraint forces none. Shares nothing between requests."""

    name = "grammar"

    def begin(self, request: Request) -> GrammarSession:
        """Start drafting with an empty answer."""
        return GrammarSession(self.name, request)


class GrammarSession:
    """Follows one output under one constraint."""

    def __init__(self, source: str, request: Request) -> None:
        self._source, self._shape, self._end_ids = source, request.shape, request.end_token_ids
        self._output: list[int] = []

    def match(self, budget: int) -> Candidates:
        """The forced tokens as a chain, up to and including one that ends the answer."""
        if self._shape is None or budget <= 0:
            return Candidates(self._source)
        forced = forced_tokens(self._shape, self._output)[:budget]
        end = next((place for place, token in enumerate(forced, start=1) if token in self._end_ids), budget)
        nodes = [(token, depth - 1, _CERTAIN, min(depth, _MAX_BIN)) for depth, token in enumerate(forced[:end])]
        return Candidates.of(self._source, nodes)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Append the committed tokens to the output."""
        self._output += token_ids

    def end(self) -> None:
        """Release the constraint; the session proposes nothing afterwards."""
        self._shape, self._output = None, []
