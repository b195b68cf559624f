"""How far to trust a source in the current request, from its expected and actual acceptances there.

`Calibration` learns from all requests how often candidates in a bin are accepted. If the memory is wrong for one
request, it is wrong in all bins at once, and each bin would have to fail separately. So every request counts, for every
source, the acceptances that were expected and those that happened, and scales the calibrated estimates by their ratio:

    factor = min(1, (accepted + STRENGTH) / (expected + STRENGTH))

A source that does better than expected is not trusted more: the calibration soon learns that anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.runtime.compiled import Floats, Int32s, Int64s, compiled

STRENGTH = 2.0
"""Expected acceptances that must fail before trust in a source is halved."""

REMEMBERED = 0.98
"""Factor by which earlier outcomes are discounted with each verified candidate, because an answer's text changes.

A step without a verified candidate discounts them too; otherwise a source that is no longer used would never recover.
"""


class Trust:
    """One request's experience with each source; a source without any is trusted fully."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}  # expected, accepted

    def factors(self, sources: Sequence[str]) -> Floats:
        """How far to trust each of these sources, `[num_sources]` in (0, 1]."""
        return np.array([self._factor(source) for source in sources])

    def learn(self, sources: Sequence[str], outcomes: Floats) -> None:
        """Add the counts of `outcomes_by_source`."""
        for source, (expected, accepted, remembered) in zip(sources, outcomes.tolist(), strict=True):
            before, kept = self._of.get(source, (0.0, 0.0)), min(remembered, REMEMBERED)
            self._of[source] = before[0] * kept + expected, before[1] * kept + accepted

    def _factor(self, source: str) -> float:
        expected, accepted = self._of.get(source, (0.0, 0.0))
        return min(1.0, (accepted + STRENGTH) / (expected + STRENGTH))


@compiled
def outcomes_by_source(believed: Floats, counts: Int64s, nodes: Int32s, parents: Int32s, verdict: Floats) -> Floats:
    """Expected acceptances, actual ones, and the factor for earlier ones, of a step's candidates, `[num_sources, 3]`.

    Source s has the next `counts[s]` candidates. Candidate i had probability `believed[i]` and became tree node
    `nodes[i]` (-1: none); `parents` and `verdict` are those of `learn_from_verdict`. Only tested candidates below an
    accepted node count.
    """
    outcomes, begin = np.zeros((counts.size, 3)), 0
    for source in range(counts.size):
        expected, accepted, remembered = 0.0, 0.0, 1.0
        for i in range(begin, begin + counts[source]):
            if nodes[i] >= 0 and verdict[parents[nodes[i]]] > 0.0 and verdict[nodes[i]] >= 0.0:
                expected = expected * REMEMBERED + believed[i]
                accepted = accepted * REMEMBERED + verdict[nodes[i]]
                remembered *= REMEMBERED
        outcomes[source] = expected, accepted, remembered
        begin += counts[source]
    return outcomes
