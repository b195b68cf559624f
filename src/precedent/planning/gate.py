"""Bound what drafting may lose: rows of trees that are rejected, and draws of a model that do not pay off.

`Allowance` bounds trees. A tree costs its rows even if all of it is rejected, and early in a request nothing has shown
yet whether its candidates are right. So a tree is planned only if its request and its tenant can afford to lose it
whole. What accepted trees gain, later ones may lose again, so good candidates soon get all the rows that pay off.

`Gate` decides about one drafter that runs a model: measured time and gain decide, and a closed gate can reopen. Whether
it pays on this machine and this traffic is not known in advance. So it is tried for a few steps at first, and again
later whenever all probes together cost less than a hundredth of the decoding time, or after probes in vain less.

What draws bring is calibrated like any candidate's estimate. What a forward for fixed candidates brings is known only
afterwards: the expected tokens of the plan with its candidates, less those without, remembered per unit of open mass,
since a forward adds little where the other candidates are surely right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median_low
from typing import NamedTuple

PROBE_STEPS = 4
"""Steps of a probe: the first may have to prefill the draft model; the others show what a draw costs afterwards."""

PROBE_DRAWS = 2
"""Draws in each step of a probe: enough to learn from, too few to cost much."""

PROBE_SHARE = 0.01
"""What probes may cost, as a share of the decoding time; the first probe is exempt until it has caught up once."""

MOST_IN_VAIN = 3
"""Probes in a row without a draw that seemed to pay, up to which each lowers that share further."""

FIRST_AFTER = 1000
"""Steps that the first probe beside fixed candidates may wait for: as long as some ten of them, it costs 1 %."""

LONG_PROMPT = 256
"""Missed tokens up to which it does not wait: catching up then takes a step or two."""

MOSTLY_OPEN = 0.75
"""Recent probability that no fixed candidate is right, from which on it waits no longer."""

PROBE_OPEN = 0.5
"""Smallest probability that no fixed candidate below the root is right, for a step to be used as a probe."""

REMEMBERED = 8
"""Times kept: of draws the smallest counts, of catching up the median. Disturbances add time, and to a first forward
the compilation."""

FAR_BEHIND = 32
"""Missed tokens above which a draw mostly spends its time catching up."""

SPREAD_OVER = 4.0
"""Drawing steps per catching up that are assumed until measured."""

MOST_STEPS = 64.0
"""Upper bound on drawing steps per catching up, so that a change of traffic is noticed soon."""

FORGOTTEN = 0.8
"""Factor by which earlier drawing steps are discounted each time a request catches up."""

LEAST_OPEN = 0.1
"""Smallest open mass from which a gain is learned; below, the quotient is mostly noise."""

LEARNED = 0.05
"""Weight of the newest gain, once there are many, and of the newest open mass."""

AT_FIRST = 0.24
"""Tokens that a request's trees may lose before any has gained something: 2 % of a dozen."""

PER_STEP = 0.02
"""Tokens that they may lose further, in every step."""

MOST_SAVED = 8.0
"""Most tokens that are kept of what trees gained, so that a change of the text is noticed soon."""

RESERVE = 2.5
"""Most tokens that a tenant's next requests may lose, besides, of what the trees of earlier ones gained; its sure trees
may lose them before. Enough for the first tree of an answer that is already known: with 1.0 a warm cache alone took a
quarter more steps on the order desk."""

SURE = 0.95
"""Probability of a tree's first token from which on the tree may be lost before its tenant has earned anything."""


class Allowance:
    """How many tokens of plain decoding the trees of a request, or a tenant, may still lose."""

    def __init__(self, left: float = AT_FIRST, most: float = MOST_SAVED) -> None:
        self.left, self.most = left, most

    def with_tenants(self, tenant: Allowance, *, sure: bool) -> float:
        """Tokens that the request's next tree may lose."""
        return max(0.0, self.left) + max(0.0, RESERVE + min(0.0, tenant.left) if sure else tenant.left)

    def settle(self, gained: float, tenant: Allowance) -> None:
        """Take note of a step: the tenant gets half of what was gained, and bears what the request cannot."""
        share = min(0.5 * gained, tenant.most - tenant.left) if gained > 0.0 else min(0.0, gained + max(0.0, self.left))
        tenant.left += share
        self.left = min(self.left + PER_STEP + gained - share, self.most)


class Without(NamedTuple):
    """A plan without a forward's candidates: its expected tokens, its rows, and the mass open at the root."""

    expected: float
    rows: int
    open_mass: float


@dataclass(slots=True)
class Gate:
    """Tracks the cost of one drafter that runs model steps; all times in milliseconds.

    `drawing_steps / catch_ups` is the recent number of steps with draws per catching up. `together` is how many
    requests may draw in the same forwards: each pays a share of a draw, so times are kept per number of requests.
    `decided` counts steps, and `usually_open` is their recent open mass. A forward for fixed candidates brings `tokens`
    and `rows` more per unit of open mass.
    """

    elapsed: float = 0.0
    spent_on_probes: float = 0.0
    last_probe: float = 0.0
    decided: int = 0
    usually_open: float = 0.0
    probe_steps_left: int = PROBE_STEPS
    on_probe: bool = False
    exempt: bool = True
    in_vain: int = 0
    behind: int = 0
    together: int = 1
    drawing_steps: float = SPREAD_OVER
    catch_ups: float = 1.0
    tokens: float = 1.0
    rows: float = 4.0
    gains_seen: int = 0
    _each: dict[int, deque[float]] = field(default_factory=dict)
    _missed: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=REMEMBERED))

    @property
    def measured(self) -> bool:
        """Whether the cost of a draw has been measured."""
        return bool(self._each)

    def milliseconds(self, num_draws: int) -> float:
        """What that many draws cost now, including a step's share of catching up.

        Without a cache, a draft model draws in every step of a request; beside one it may draw once and then never
        again.
        """
        share = self.catch_ups / self.drawing_steps
        return num_draws * self._of_one + self.behind * self._of_missed * share

    @property
    def _of_one(self) -> float:
        """Cost of one draw, as measured with the most requests up to `together`, or else with the fewest."""
        fewer = [number for number in self._each if number <= self.together]
        return min(self._each[max(fewer) if fewer else min(self._each)]) if self._each else 0.0

    @property
    def _of_missed(self) -> float:
        """Cost of catching up with one token: the median of those kept, and of a first 0.

        So one slow time, such as one that compiled, does not keep the draft model out.
        """
        return median_low(self._missed)

    def decide(self, wanted: int, open_mass: float = 1.0, *, beside: bool = False) -> int:
        """How many draws to make if `wanted` seem to pay off (0: none).

        `open_mass` is the probability that no fixed candidate comes next; `beside` says whether there may be any. A
        probe waits for steps in which a draw can matter: catching up would be wasted where the fixed candidates are
        right. Where they mostly are, the first one waits for many steps, unless the prompt is short.
        """
        self.decided += 1
        self.usually_open += LEARNED * (open_mass - self.usually_open)
        waited = self.usually_open >= MOSTLY_OPEN or self.decided > FIRST_AFTER
        due = waited or not beside or self.behind <= LONG_PROMPT
        if wanted:
            self.in_vain = 0
        affordable = self.spent_on_probes + self.last_probe < PROBE_SHARE / (1 + self.in_vain) * self.elapsed
        cheap = self.behind <= FAR_BEHIND or (due if self.exempt else affordable)
        self.on_probe = self.probe_steps_left > 0 and open_mass >= PROBE_OPEN and cheap
        if self.on_probe:
            self.probe_steps_left -= 1
            return max(PROBE_DRAWS, wanted) if self._each else PROBE_DRAWS
        if self.probe_steps_left:  # the probe waits; an unknown cost of draws must not count as zero
            return wanted if self._each else 0
        if affordable and not wanted:
            self.probe_steps_left, self.last_probe, self.exempt = PROBE_STEPS, 0.0, False
            self.in_vain = min(self.in_vain + 1, MOST_IN_VAIN)
        return wanted

    def observe(self, num_draws: int, behind: int, milliseconds: float, together: int = 1) -> None:
        """Learn what one request's draws cost, given `together` requests drawing and `behind` tokens to catch up on.

        A time that cannot be, negative or not finite, says nothing.
        """
        if not 0.0 <= milliseconds < inf:
            return
        if behind > FAR_BEHIND:
            catching_up = milliseconds - num_draws * self._of_one
            self._missed.append(max(0.0, catching_up) / behind)
            self.drawing_steps, self.catch_ups = FORGOTTEN * self.drawing_steps, FORGOTTEN * self.catch_ups + 1.0
        else:
            times = self._each.setdefault(together, deque(maxlen=REMEMBERED))
            times.append(milliseconds / max(num_draws, 1))
        self.drawing_steps = min(self.drawing_steps + 1.0, MOST_STEPS * self.catch_ups)
        if self.on_probe:
            self.spent_on_probes += 0.0 if self.exempt else milliseconds
            self.last_probe += milliseconds
            self.exempt = self.exempt and behind <= FAR_BEHIND

    def observe_gain(self, without: Without, expected: float, rows: int) -> None:
        """Learn from the plan that was made with a forward's candidates."""
        if without.open_mass < LEAST_OPEN:
            return
        self.gains_seen += 1
        weight = max(LEARNED, 1.0 / self.gains_seen)
        self.tokens += weight * (max(0.0, expected - without.expected) / without.open_mass - self.tokens)
        self.rows += weight * (max(0, rows - without.rows) / without.open_mass - self.rows)
