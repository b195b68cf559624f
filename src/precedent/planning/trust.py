"""How far to believe a source in the request at hand: what came true there of what was expected of it.

`Calibration` learns from all requests what a kind of candidate is worth. Where the memory is wrong for one request it
is wrong in all kinds at once, and each would have to be seen failing by itself. So every request keeps, for every
source, the acceptances that its candidates were believed to bring and those that came, and scales what the calibration
says by their ratio:

    factor = min(1, (accepted + STRENGTH) / (expected + STRENGTH))

A source that does better than expected is not believed more: its luck in one request is soon in the calibration too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.runtime.compiled import Floats, Int32s, Int64s, compiled

STRENGTH = 2.0
"""Expected acceptances that may fail to come before a source is believed half."""

REMEMBERED = 0.98
"""What counts of the outcomes before, each time that a candidate is judged: the text of an answer changes too.

So it does in a step in which none was judged, or a source that nobody asks any more would be doubted for ever.
"""


class Trust:
    """One request's experience with each source; without any, everybody is believed."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}  # expected, accepted

    def factors(self, sources: Sequence[str]) -> Floats:
        """How far to believe each of these sources, `[num_sources]` in (0, 1]."""
        return np.array([self._factor(source) for source in sources])

    def learn(self, sources: Sequence[str], outcomes: Floats) -> None:
        """Take in what `outcomes_by_source` counted."""
        for source, (expected, accepted, remembered) in zip(sources, outcomes.tolist(), strict=True):
            before, kept = self._of.get(source, (0.0, 0.0)), min(remembered, REMEMBERED)
            self._of[source] = before[0] * kept + expected, before[1] * kept + accepted

    def _factor(self, source: str) -> float:
        expected, accepted = self._of.get(source, (0.0, 0.0))
        return min(1.0, (accepted + STRENGTH) / (expected + STRENGTH))


@compiled
def outcomes_by_source(believed: Floats, counts: Int64s, nodes: Int32s, parents: Int32s, verdict: Floats) -> Floats:
    """Acceptances expected and come, and what counts of those before, `[num_sources, 3]`, of a step's candidates.

    Source s has the next `counts[s]` candidates; candidate i was `believed[i]` likely and became tree node `nodes[i]`
    (-1: none); `parents` and `verdict` are those of `learn_from_verdict`. Only what hangs below an accepted node
    counts.
    """
    outcomes, begin = np.zeros((counts.size, 3)), 0
    for source in range(counts.size):
        expected, accepted, remembered = 0.0, 0.0, 1.0
        for i in range(begin, begin + counts[source]):
            if nodes[i] >= 0 and verdict[parents[nodes[i]]] > 0.0:
                expected = expected * REMEMBERED + believed[i]
                accepted = accepted * REMEMBERED + verdict[nodes[i]]
                remembered *= REMEMBERED
        outcomes[source] = expected, accepted, remembered
        begin += counts[source]
    return outcomes
