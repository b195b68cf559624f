"""Whether a draft model is asked at all: measured time decides, and a closed gate can re-open.

Nobody knows beforehand whether a draft model pays on this machine and this traffic. So it is tried for a few steps at
first, and later again whenever all trials together stay within a hundredth of the time spent decoding.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

TRIAL_STEPS = 4
"""Steps of a trial: the first one may have to prefill the draft model, the others show what a draw costs then."""

TRIAL_DRAWS = 2
"""Draws in each step of a trial: enough to learn from, too few to cost much."""

TRIAL_SHARE = 0.01
"""What trials may cost, as a share of the time spent decoding; the first trial is not held to it."""

TRIAL_OPEN = 0.5
"""Probability that no point below the root is right, from which on a step is fit for a trial."""

REMEMBERED = 8
"""Draw times of which the least counts: the others were disturbed."""

FAR_BEHIND = 32
"""Missed tokens above which a draw's time is mostly that of catching up."""

SPREAD_OVER = 16.0
"""Steps of draws over which catching up is taken to be paid off, until it was seen."""

MOST_STEPS = 64.0
"""Drawing steps per catching up that are believed at most, so that another kind of traffic is noticed soon."""

FORGOTTEN = 0.8
"""What counts of the drawing steps seen before, each time that a request catches up."""


@dataclass(slots=True)
class DrawGate:
    """The account of one drafter that costs model steps; all times in milliseconds.

    `drawing_steps` by `catch_ups` is how many steps with draws followed one catching up, of late. `together` is how
    many requests may draw in step: a draw costs each of them its share, so times are kept apart by their number.
    """

    elapsed: float = 0.0
    spent_on_trials: float = 0.0
    last_trial: float = 0.0
    trial_steps_left: int = TRIAL_STEPS
    on_trial: bool = False
    behind: int = 0
    together: int = 1
    milliseconds_per_missed_token: float = 0.0
    drawing_steps: float = SPREAD_OVER
    catch_ups: float = 1.0
    _each: dict[int, deque[float]] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether it is known what a draw costs."""
        return bool(self._each)

    def milliseconds(self, num_draws: int) -> float:
        """What that many draws cost now, with a step's share of catching up.

        A draft model on its own draws in every step of a request; beside a cache it may be asked once, and then never.
        """
        share = self.catch_ups / self.drawing_steps
        return num_draws * self._of_one + self.behind * self.milliseconds_per_missed_token * share

    @property
    def _of_one(self) -> float:
        """What a draw costs beside so many: as was seen with no more requests than that, else with the fewest."""
        fewer = [number for number in self._each if number <= self.together]
        return min(self._each[max(fewer) if fewer else min(self._each)]) if self._each else 0.0

    def decide(self, wanted: int, open_mass: float = 1.0) -> int:
        """How many draws to make when `wanted` seem to pay (0: none); the points found leave `open_mass` to them.

        A trial waits for steps in which a draw could matter: catching up beside a memory that knows would be wasted.
        """
        self.on_trial = self.trial_steps_left > 0 and open_mass >= TRIAL_OPEN
        if self.on_trial:
            self.trial_steps_left -= 1
            return max(TRIAL_DRAWS, wanted) if self._each else TRIAL_DRAWS
        if self.trial_steps_left:  # the trial waits, and what draws cost may be unknown, which is not nothing
            return wanted if self._each else 0
        affordable = self.spent_on_trials + self.last_trial < TRIAL_SHARE * self.elapsed
        if affordable and not wanted:
            self.trial_steps_left, self.last_trial = TRIAL_STEPS, 0.0
        return wanted

    def observe(self, num_draws: int, behind: int, milliseconds: float, together: int = 1) -> None:
        """Learn what a request's draws cost that were made `together` with others', `behind` tokens to catch up on."""
        if behind > FAR_BEHIND:
            catching_up = milliseconds - num_draws * self._of_one
            self.milliseconds_per_missed_token = max(0.0, catching_up) / behind
            self.drawing_steps, self.catch_ups = FORGOTTEN * self.drawing_steps, FORGOTTEN * self.catch_ups + 1.0
        else:
            times = self._each.setdefault(together, deque(maxlen=REMEMBERED))
            times.append(milliseconds / max(num_draws, 1))
        self.drawing_steps = min(self.drawing_steps + 1.0, MOST_STEPS * self.catch_ups)
        if self.on_trial:
            self.spent_on_trials += milliseconds
            self.last_trial += milliseconds
