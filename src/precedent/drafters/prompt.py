"""The drafter that copies from the prompt and the answer itself, where ids, names and dates come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.drafters.base import Candidates
from precedent.drafters.matching.alignment import Trail
from precedent.drafters.matching.context_order import MAX_MATCH
from precedent.drafters.matching.occurrences import HIT, VoteWeights
from precedent.drafters.matching.search import Found, Search, SearchSession
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.drafters.matching.vote_tree import VotePrior
from precedent.drafters.request import Request

_MAX_OCCURRENCES = 128
# Fitted on recorded agent traces, without those on which figures are reported.
_PRIOR = VotePrior(offset=-1.83, odds=1.05, length=0.86, count=-0.1, similarity=0.0).as_array()
_NO_TRAIL = Trail()
_WEIGHTS = VoteWeights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(1), recency=1.0)


class PromptDrafter:
    """N-gram lookup in the prompt and the output; shares nothing between requests."""

    name = "prompt"
    begins_early = True

    def begin(self, request: Request) -> PromptSession:
        """Index the prompt: about one millisecond for 2,000 tokens."""
        return PromptSession(self.name, request)

    def close(self) -> None:
        """Do nothing: requests share nothing."""


class PromptSession(SearchSession):
    """Indexes one prompt and the output that follows it."""

    def __init__(self, source: str, request: Request) -> None:
        self._source = source
        self._end_ids = np.array(sorted(request.end_token_ids), dtype=np.int32)
        self._index: TokenIndex | None = TokenIndex()
        self._context = list(request.prompt_ids[-MAX_MATCH:])
        self._index.append(0, request.prompt_ids)

    def search(self, budget: int) -> Search | None:
        """The search for what followed the same tokens earlier in prompt or output."""
        if self._index is None or budget <= 0:
            return None
        return self._index.search(
            reversed_context(self._context), _WEIGHTS, _MAX_OCCURRENCES,
            trail=_NO_TRAIL, budget=budget, prior=_PRIOR, end_ids=self._end_ids,
        )  # fmt: skip

    def take(self, found: Found | None) -> Candidates:
        """The candidates."""
        return Candidates(self._source) if found is None else Candidates(self._source, found.nodes)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Append the committed tokens to the index."""
        if self._index is not None:
            self._context = [*self._context, *token_ids][-MAX_MATCH:]
            self._index.append(0, token_ids)

    def end(self) -> None:
        """Drop the index; the session proposes nothing afterwards."""
        self._index, self._context = None, []
