"""How often a candidate with given features is accepted: Beta-Bernoulli bins, learned online.

Labels are unbiased: once a node is accepted, the outcome of each of its children is known. A bin is a small number that
a drafter computes from a candidate's features, so requests share evidence (retrieval research: calibrated estimates
beat raw vote shares).

`Calibration` learns from all requests how often candidates in a bin are accepted. If the memory is wrong for one
request, it is wrong in all bins at once, and each bin would have to fail separately. So every request counts, for every
source, the acceptances that were expected and those that happened, and scales the calibrated estimates by their ratio:

    factor = min(1, (accepted + STRENGTH) / (expected + STRENGTH))

A source that does better than expected is not trusted more: the calibration soon learns that anyway.

Each tenant has a calibration of its own (`Calibrations`): what one tenant's answers teach shapes no other's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.planning.gate import RESERVE, Allowance
from precedent.runtime.compiled import Floats, Int32s, Int64s, compiled
from precedent.runtime.recent import Recent

PRIOR_STRENGTH = 4.0
"""Weight of the drafter's own estimate, in observations."""

HALF_LIFE = 400.0
"""Observations after which an outcome counts half, because traffic changes."""

BINS_PER_SOURCE = 1 << 13
"""Bins of one drafter; larger bin numbers wrap around."""

MOST_TENANTS = 64
"""Tenants whose calibrations are held: about 130 kB for each of a tenant's sources."""

_DECAY = 0.5 ** (1.0 / HALF_LIFE)


class Calibration:
    """Acceptance probability per bin; an unseen bin returns the drafter's own estimate.

    `accepted` and `seen` are decayed counts, `[num_sources * BINS_PER_SOURCE]`. `allowance` is what trees of the
    tenant's next requests may lose; `worth` is the steps that an accepted sample of a draft model saves: fewer than one
    where the next step has good fixed candidates again.
    """

    def __init__(self) -> None:
        self.allowance, self.worth = Allowance(0.0, RESERVE), 1.0
        self.accepted = np.zeros(0)
        self.seen = np.zeros(0)
        self._first: dict[str, int] = {}

    def first_bin(self, source: str) -> int:
        """Index of a source's first bin; allocates bins for a new source."""
        first = self._first.get(source)
        if first is None:
            first = self._first[source] = self.seen.size
            room = np.zeros(BINS_PER_SOURCE)
            self.accepted, self.seen = np.concatenate([self.accepted, room]), np.concatenate([self.seen, room])
        return first

    def probability(self, source: str, bin_: int, estimate: float) -> float:
        """Probability in (0, 1] that a candidate is accepted once its parent is."""
        number = self.first_bin(source) + bin_ % BINS_PER_SOURCE  # first: it may replace the arrays
        return calibrated(self.accepted, self.seen, number, estimate)

    def observe(self, source: str, bin_: int, accepted: bool) -> None:
        """Learn one outcome."""
        number = self.first_bin(source) + bin_ % BINS_PER_SOURCE  # first: it may replace the arrays
        learn(self.accepted, self.seen, number, accepted)


class Calibrations:
    """The calibrations of the most recent tenants.

    One thread uses them; any may call `forget`.
    """

    def __init__(self) -> None:
        self._held = Recent[str, Calibration](MOST_TENANTS)

    def of(self, tenant: str) -> Calibration:
        """The tenant's calibration."""
        return self._held.get_or_make(tenant, Calibration)

    def forget(self) -> None:
        """Begin all anew; plans that are made already still learn into what is dropped here."""
        self._held = Recent(MOST_TENANTS)


@compiled
def calibrated(accepted: Floats, seen: Floats, number: int, estimate: float) -> float:
    """The estimate, corrected by the observations in bin `number`."""
    return float((accepted[number] + PRIOR_STRENGTH * estimate) / (seen[number] + PRIOR_STRENGTH))


@compiled
def learn(accepted: Floats, seen: Floats, number: int, outcome: bool) -> None:
    """Count one outcome in bin `number`; modifies both arrays."""
    accepted[number] = accepted[number] * _DECAY + outcome
    seen[number] = seen[number] * _DECAY + 1.0


@compiled
def learn_from_verdict(
    accepted: Floats, seen: Floats, numbers: Int64s, nodes: Int32s, parents: Int32s, verdict: Floats
) -> None:
    """Count the outcome of every candidate whose parent was accepted; modifies both arrays.

    Candidate i, in bin `numbers[i]`, became tree node `nodes[i]` (-1: none). `parents` `[num_nodes]` are the tree's;
    `verdict` `[num_nodes + 1]` is 1 for accepted nodes and, as its last entry, for the root; 0 for rejected ones, and
    negative for those that were not tested.
    """
    for i in range(nodes.size):
        if nodes[i] >= 0 and verdict[parents[nodes[i]]] > 0.0 and verdict[nodes[i]] >= 0.0:
            learn(accepted, seen, numbers[i], verdict[nodes[i]] > 0.0)


# Trust of one request in its sources

STRENGTH = 2.0
"""Expected acceptances that must fail before trust in a source is halved."""

REMEMBERED = 0.98
"""Factor by which earlier outcomes are discounted with each verified candidate, because an answer's text changes.

A step without a verified candidate discounts them too; otherwise a source that is no longer used would never recover.
"""


class Trust:
    """One request's experience with each source; a source without any is trusted fully.

    `allowance` is what its trees may still lose. `was_open` tells of the last step that its fixed candidates were
    probably all wrong.
    """

    def __init__(self, allowance: Allowance | None = None) -> None:
        self.allowance, self.was_open = allowance or Allowance(), False
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
