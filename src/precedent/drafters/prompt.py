"""The drafter that copies from the live prompt and from the answer itself: ids, names and dates come from there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from precedent.drafters.base import Candidates, DraftRequest
from precedent.drafters.expand import Evidence, LogisticPrior, expand
from precedent.drafters.token_index import MAX_DEPTH, TokenIndex
from precedent.sampling import Coins
from precedent.tree import TreeBuilder

_MAX_OCCURRENCES = 128
_LENGTH_WEIGHT = 0.7
_RECENCY_WEIGHT = 1.0
# Fitted on recorded agent traces; the customers on whose traces figures are reported took no part.
_PRIOR = LogisticPrior(offset=-1.83, odds=1.05, length=0.86, count=-0.1, similarity=0.0)
_estimate = lru_cache(maxsize=1 << 14)(_PRIOR)


class PromptDrafter:
    """N-gram lookup in the live prompt and output; nothing is shared between requests."""

    name = "prompt"
    draws = False

    def begin(self, request: DraftRequest) -> PromptDrafting:
        """Index the prompt: about one millisecond for 2,000 tokens."""
        return PromptDrafting(self.name, request)

    def close(self) -> None:
        """Nothing is shared between requests."""


class PromptDrafting:
    """One live prompt and the output that grows behind it."""

    behind = 0

    def __init__(self, source: str, request: DraftRequest) -> None:
        self._source, self._end_ids = source, request.end_token_ids
        self._index: TokenIndex | None = TokenIndex()
        self._text = list(request.prompt_ids)
        self._index.append(0, self._text)

    def match(self, budget: int) -> Candidates:
        """At most `budget` candidates that followed the same words earlier in prompt or output."""
        if self._index is None or budget <= 0:
            return Candidates(self._source)
        found = self._index.match(self._text, _MAX_OCCURRENCES)
        continuations = self._index.continuations(found.positions, min(budget, MAX_DEPTH))
        useful = continuations[:, 0] >= 0  # the live end matches itself, with nothing behind it
        lengths, positions = found.lengths[useful], found.positions[useful]
        recency = positions / max(1, len(self._text))
        log_weights = _LENGTH_WEIGHT * lengths + _RECENCY_WEIGHT * recency
        evidence = Evidence(continuations[useful], log_weights, lengths, np.zeros_like(lengths))
        return expand(self._source, evidence, budget, _estimate, self._end_ids).candidates

    def draw(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> None:
        """Nothing: this drafter only looks things up."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """The output grew."""
        if self._index is not None:
            self._text.extend(token_ids)
            self._index.append(0, token_ids)

    def end(self) -> None:
        """Drop the index; afterwards nothing is proposed."""
        self._index, self._text = None, []
