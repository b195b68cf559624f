"""What a step costs by its width: a curve that is given or learned, and steps that try other widths.

`StepCosts` learns while an engine runs: a curve through the measured widths, times the machine's load.

    milliseconds = load * (curve(rows) + rows * prefix / 1000 * per_key)

Only the ratio between widths decides about a tree, and other programs slow down every width alike. The two factors are
learned from different evidence, so that they cannot trade:

- `load` is the median, over the last few steps of any width, of the measured time divided by the curve's.
- The curve learns from comparisons. A step that took longer than the curve says, compared with the steps around it,
  raises the cost of its width relative to theirs. Steps of a single width compare nothing and change nothing, however
  noisy they are. The narrowest width is the anchor: its cost never changes, all others move relative to it.

One step moves a width by a bounded factor, and no width leaves the range that narrower ones allow.

`Probes` try other widths now and then: the longer no step had a width, the cheaper it might have become. Every so
often the plan is made once more as if it had; if that changes the plan, the changed one runs. What probes are expected
to lose stays below a hundredth of the time of all steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import median
from time import perf_counter
from typing import NamedTuple, Self, TypeVar

import numpy as np

from precedent.runtime.compiled import Floats, Int64s, compiled
from precedent.runtime.fence import Fault
from precedent.runtime.plain_values import is_number, shown

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 257)
"""Widths that are told apart, in tokens per forward (pending token included)."""

WIDEST = WIDTHS[-1]
"""Widths of a given curve; beyond, its last slope goes on."""

SHORTEST, LONGEST = 1e-3, 1e7
"""Bounds of a step's milliseconds: a clock that shows less stands still, one that shows more jumped."""


def is_time(milliseconds: float) -> bool:
    """Whether a step can have taken so long; False for 0, negative times, infinity and NaN."""
    return SHORTEST <= milliseconds <= LONGEST


def nearest_width(width: int) -> int:
    """The one of `WIDTHS` whose ratio to a width is nearest to 1."""
    above = bisect_left(WIDTHS, width)
    if above == len(WIDTHS):
        return WIDEST
    below = max(0, above - 1)
    return WIDTHS[above if width * width > WIDTHS[below] * WIDTHS[above] else below]


def along(rows: Floats, widths: Int64s, times: Floats) -> Floats:
    """Times of ascending numbers of rows, in straight lines through points; beyond, the last slope unless it falls."""
    curve = np.interp(rows, widths, times)
    if widths.size > 1 and rows[-1] > widths[-1]:
        slope = max(0.0, (times[-1] - times[-2]) / (widths[-1] - widths[-2]))
        curve += slope * np.maximum(0.0, rows - widths[-1])
    return curve


STEP_COSTS = "step costs"
"""The cost curve's name among the aids of an engine."""

Read = TypeVar("Read")


class CostCurve:
    """Milliseconds of one forward by its width in tokens. A new one is flat.

    `table` holds the milliseconds of a forward over 1, 2, ... tokens, `[WIDEST]`. `load` is how many times as long
    everything takes at present as on a quiet machine; `learns` says whether `observe` changes anything.
    """

    load = 1.0
    learns = False

    def __init__(self) -> None:
        self.table: Floats = np.ones(WIDEST)

    @classmethod
    def through(cls, milliseconds: Mapping[int, float]) -> Self:
        """The curve through given widths: straight lines between them; beyond, the last slope unless it falls."""
        curve, widths = cls(), sorted(milliseconds)
        times = np.array([milliseconds[width] for width in widths], dtype=float)
        curve.table = along(np.arange(1.0, WIDEST + 1.0), np.array(widths), times)
        return curve

    def milliseconds(self, width: int, prefix: int = 0) -> float:
        """Time of a forward over `width` tokens, all sequences together, that see `prefix` tokens before them."""
        table = self.table
        if width <= WIDEST:
            return float(table[width - 1])
        return float(table[-1] + (table[-1] - table[-2]) * (width - WIDEST))

    def beside(self, rows: int, prefix: int = 0, most: int = WIDEST) -> Floats:
        """Milliseconds of a forward over `rows` tokens of other sequences plus 1, 2, ... `most` or more."""
        table = self.table
        if rows + most <= WIDEST:
            return table[rows:]
        widths = np.arange(max(rows, WIDEST) + 1, rows + most + 1)
        beyond = table[-1] + (table[-1] - table[-2]) * (widths - WIDEST)
        return np.concatenate([table[rows:], beyond])

    def as_dict(self) -> dict[int, float]:
        """Milliseconds of a step at some widths."""
        return {width: self.milliseconds(width) for width in WIDTHS}

    def observe(self, width: int, milliseconds: float, prefix: int = 0, threads: int = 1) -> None:
        """Take note of a forward's time. A given curve does not change."""


class CheckedCosts:
    """Reads a curve for the planner. Raises Fault for a curve that fails, or whose numbers are not finite and positive.

    `curve` returns the curve to read.
    """

    def __init__(self, curve: Callable[[], CostCurve]) -> None:
        self._curve = curve

    @property
    def load(self) -> float:
        """The curve's load."""
        return self._number(lambda curve: curve.load)

    def milliseconds(self, width: int, prefix: int = 0) -> float:
        """The curve's time of a forward."""
        return self._number(lambda curve: curve.milliseconds(width, prefix))

    def beside(self, rows: int, prefix: int, most: int) -> Floats:
        """The curve's times of forwards over `rows` tokens of other sequences plus 1, 2, ... `most` or more."""
        costs = self._read(lambda curve: curve.beside(rows, prefix, most))
        if not isinstance(costs, np.ndarray) or costs.ndim != 1 or not 0 < costs.size <= rows + most + WIDEST:
            raise Fault(STEP_COSTS, f"expected the times of up to {most} rows, got {type(costs).__name__}")
        if costs.dtype != np.float64 or not (costs.min() > 0.0 and costs.max() < np.inf):
            raise Fault(STEP_COSTS, "the times of a step are not all finite and positive")
        return costs

    def _number(self, read: Callable[[CostCurve], float]) -> float:
        number = self._read(read)
        if not is_number(number) or not number > 0.0:
            raise Fault(STEP_COSTS, f"expected a finite positive number, got {number!r}")
        return number

    def _read(self, read: Callable[[CostCurve], Read]) -> Read:
        try:
            return read(self._curve())
        except Exception as error:
            raise Fault(STEP_COSTS, f"{type(error).__name__}: {error}") from error


# The curve that is learned

START_UP_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Widths measured before the first request."""

START_UP_SECONDS = 1.5
"""Time limit for measuring; each width runs at least once, and again as long as a whole round fits."""

MOST_ROUNDS = 100
"""Most rounds of measuring, in case the clock stands still."""

WINDOW = 7
"""Steps that are compared with each other. The middle one is learned from once the steps around it are known."""

MOST_KNOWN = 1 << 16
"""Most rows, and most threads, that an earlier process is believed to have had."""

LEAST_LOAD, MOST_LOAD = 1e-3, 1e3
"""Bounds of the load."""

FLOOR = 0.5
"""Least cost of a width, as a share of the next narrower one's. Dips are real: 16 rows may cost less than 12."""

CEILING = 1.25
"""Most cost of a width, as a multiple of the narrower steps that it could be divided into."""

MOST_LONGER, MOST_SHORTER = 0.5, 2.0
"""Bounds of a surprise, as logarithms. Other programs only add time, so a short step says more than a long one."""

NOISE, LEAST_NOISE, MOST_NOISE = 0.1, 0.02, 1.0
"""Variance of the logarithm of a step's time at first, and the bounds of what replaces it: the mean of recent surprises
squared."""

RECENT = 0.02
"""Weight of the last surprise in that mean."""

DOUBT = 0.1
"""Variance of the logarithm of a width's cost before any step, and the most it grows to."""

MORE_DOUBT = 0.00005
"""Growth of that variance with each comparison, since machines and contexts change."""

PER_KEY = 0.1
"""Share of a row's cost that a thousand tokens of context are assumed to add to it."""

FIXED_BY_TEAM = 0.5
"""The cost of the narrowest step grows with this power as a team shrinks: memory, not threads, sets its pace."""

KEY_UNIT = 1 / 16
"""Of the anchor's cost: the size of a typical error in `per_key`."""


class _Step(NamedTuple):
    """One observed step."""

    shape: _Shape
    width: int
    prefix: int
    log_milliseconds: float


class _Shape:
    """Step times at load 1 for one number of threads.

    The curve goes through `milliseconds` at `widths` (some of `WIDTHS`, the anchor first), in straight lines. `per_key`
    is what a thousand tokens of context add to each row.
    """

    def __init__(self, milliseconds: Mapping[int, float], per_key: float) -> None:
        self.widths = np.array(sorted(milliseconds))
        self.milliseconds = np.array([milliseconds[width] for width in sorted(milliseconds)])
        self.per_key = per_key
        self._doubts = np.full(self.widths.size + 1, DOUBT)  # the last one is about `per_key`
        self._noise = NOISE
        _keep_bounds(self.widths, self.milliseconds)

    @property
    def known(self) -> dict[str, float]:
        """Milliseconds by width, and `per_key`."""
        points = zip(self.widths.tolist(), self.milliseconds.tolist(), strict=True)
        return {"per_key": self.per_key, **{str(width): milliseconds for width, milliseconds in points}}

    def expected(self, width: int, prefix: int) -> float:
        """Milliseconds of one step."""
        return float(_expected(self.widths, self.milliseconds, self.per_key, width, prefix))

    def table(self, rows: Floats, prefix: int) -> Floats:
        """Milliseconds of steps of ascending numbers of rows."""
        return along(rows, self.widths, self.milliseconds) + rows * (prefix / 1000.0 * self.per_key)

    def add(self, width: int) -> None:
        """Let the curve bend at the one of `WIDTHS` that is nearest to a measured width."""
        nearest = nearest_width(width)
        at = bisect_left(self.widths, nearest)
        if at == self.widths.size or self.widths[at] != nearest:
            self.milliseconds = np.insert(self.milliseconds, at, self.expected(nearest, 0))
            self._doubts = np.insert(self._doubts, at, DOUBT)
            self.widths = np.insert(self.widths, at, nearest)
            _keep_bounds(self.widths, self.milliseconds)

    def compare(self, steps: Sequence[_Step], chosen: _Step) -> None:
        """Learn from one step, compared with all of `steps`."""
        observed = np.array([(step.width, step.prefix, step.log_milliseconds) for step in steps])
        self.per_key, surprise = _compare(
            self.widths, self.milliseconds, self.per_key, self._doubts, self._noise, observed, steps.index(chosen)
        )
        noise = self._noise + RECENT * (surprise**2 - self._noise)
        self._noise = max(LEAST_NOISE, min(MOST_NOISE, noise))


class StepCosts(CostCurve):
    """The cost curve of one engine, refined with every step. Begin it with `measure`, `begin` or `from_known`.

    Otherwise the first step's time is taken for that of every width.
    """

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[int, _Shape] = {}
        self._recent: deque[_Step] = deque(maxlen=WINDOW)
        self._threads = 1
        self._widest, self.num_steps = max(START_UP_WIDTHS), 0

    @classmethod
    def from_known(cls, known: object) -> Self:
        """The curve with an earlier process's `known`, also after JSON. Raises ValueError if it is not sound."""
        costs = cls()
        if not isinstance(known, Mapping) or not known:
            raise ValueError(f"expected costs by number of threads, got {shown(known)}")
        for threads, found in known.items():
            costs._shapes[_whole_in("a number of threads", threads, MOST_KNOWN)] = _restored(found)
        costs._threads = max(costs._shapes)
        return costs

    def measure(self, run: Callable[[int], float], threads: Callable[[], int] = lambda: 1) -> None:
        """Fill the curve with `run(width) -> milliseconds`, the best of a few each, within about `START_UP_SECONDS`.

        `threads()` tells how many computed the last run.
        """
        deadline = perf_counter() + START_UP_SECONDS
        best = {width: run(width) for width in START_UP_WIDTHS}
        for _ in range(MOST_ROUNDS):
            if perf_counter() > deadline - sum(best.values()) / 1e3:
                break
            best = {width: min(before, run(width)) for width, before in best.items()}
        self.begin(best, threads())

    def begin(self, milliseconds: Mapping[int, float], threads: int = 1) -> None:
        """Start from the times of a few widths, computed by so many threads; impossible times are left out."""
        sound = {width: float(each) for width, each in milliseconds.items() if is_time(each)}
        if sound:
            first, last = min(sound), max(sound)
            per_row = max(0.0, sound[last] - sound[first]) / max(1, last - first)
            self._shapes, self._threads = {threads: _Shape(sound, PER_KEY * per_row)}, threads
            self._recent.clear()
            self.load = 1.0

    @property
    def known(self) -> dict[str, dict[str, float]]:
        """Milliseconds by width, and `per_key`, for each number of threads: what `from_known` reads."""
        return {str(threads): shape.known for threads, shape in self._shapes.items()}

    def milliseconds(self, width: int, prefix: int = 0) -> float:
        """Time of a forward over `width` tokens, all sequences together, that see `prefix` tokens before them."""
        shape = self._shapes.get(self._threads)
        return 1.0 if shape is None else self.load * shape.expected(width, prefix)

    def beside(self, rows: int, prefix: int = 0, most: int = WIDEST) -> Floats:
        """Milliseconds of a forward over `rows` tokens of other sequences plus 1, 2, ... `most`."""
        shape = self._shapes.get(self._threads)
        if shape is None:
            return np.ones(most)
        return self.load * shape.table(np.arange(rows + 1.0, rows + most + 1.0), prefix)

    def observe(self, width: int, milliseconds: float, prefix: int = 0, threads: int = 1) -> None:
        """Learn the time of one forward, computed by so many threads. An impossible time says nothing."""
        if not is_time(milliseconds):
            return
        if not self._shapes:
            self.begin({width: milliseconds}, threads)
        if threads not in self._shapes:
            self._shapes[threads] = self._supposed(threads)
        shape, self._threads = self._shapes[threads], threads
        shape.add(width)
        self._recent.append(_Step(shape, width, prefix, log(milliseconds)))
        excess = [each.log_milliseconds - log(each.shape.expected(each.width, each.prefix)) for each in self._recent]
        self.load = min(MOST_LOAD, max(LEAST_LOAD, exp(median(excess))))
        self._learn()
        self._widest, self.num_steps = max(self._widest, width), self.num_steps + 1

    def as_dict(self) -> dict[int, float]:
        """Milliseconds at some widths, up to the widest seen, as the planner expects them now."""
        return {width: self.milliseconds(width) for width in WIDTHS if width <= self._widest}

    def _learn(self) -> None:
        """Learn from the middle one of the last steps, if they differ in width."""
        if len(self._recent) == WINDOW:
            chosen = self._recent[WINDOW // 2]
            steps = [step for step in self._recent if step.shape is chosen.shape]
            if any(step.width != chosen.width for step in steps):
                chosen.shape.compare(steps, chosen)

    def _supposed(self, threads: int) -> _Shape:
        """The shape for a new number of threads, from the nearest one: a row's price is divided among the threads."""
        nearest = min(self._shapes, key=lambda other: abs(other - threads))
        known, ratio = self._shapes[nearest], nearest / threads
        anchor = known.milliseconds[0]
        times = anchor * ratio**FIXED_BY_TEAM + (known.milliseconds - anchor) * ratio
        return _Shape(dict(zip(known.widths.tolist(), times.tolist(), strict=True)), known.per_key * ratio)


def _restored(found: object) -> _Shape:
    """The shape whose `known` was remembered. Raises ValueError if a value is missing or out of bounds."""
    if not isinstance(found, Mapping):
        raise ValueError(f"expected milliseconds by width, got {shown(found)}")
    per_key = _number_in("per_key", found.get("per_key"), 0.0, LONGEST)
    milliseconds = {
        _whole_in("a width", width, MOST_KNOWN): _number_in(f"the time of {width} rows", time, SHORTEST, LONGEST)
        for width, time in found.items()
        if width != "per_key"
    }
    if not milliseconds:
        raise ValueError("expected milliseconds by width, got none")
    return _Shape(milliseconds, per_key)


def _number_in(name: str, value: object, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"expected {name} from {least:g} to {most:g}, got {shown(value)}")
    return float(value)


def _whole_in(name: str, text: object, most: int) -> int:
    if not isinstance(text, str) or not text.isdecimal() or not 1 <= float(text) <= most:
        raise ValueError(f"expected {name} from 1 to {most}, got {shown(text)}")
    return int(text)


@compiled
def _parts(widths: Int64s, milliseconds: Floats, width: int) -> tuple[int, float, float]:
    """A point of the curve, and what it and the next one add to the milliseconds of `width` rows."""
    last = widths.size - 1
    if last == 0 or width <= widths[0]:
        return 0, float(milliseconds[0]), 0.0
    at = min(int(np.searchsorted(widths, width, side="right")) - 1, last - 1)
    share = float((width - widths[at]) / (widths[at + 1] - widths[at]))
    if share > 1.0 and milliseconds[last] < milliseconds[at]:  # beyond the last point, a falling curve stays flat
        share = 1.0
    return at, float((1.0 - share) * milliseconds[at]), float(share * milliseconds[at + 1])


@compiled
def _expected(widths: Int64s, milliseconds: Floats, per_key: float, width: int, prefix: int) -> float:
    """Milliseconds of a step at load 1."""
    _, one, other = _parts(widths, milliseconds, width)
    return one + other + width * prefix / 1000.0 * per_key


@compiled
def _compare(
    widths: Int64s,
    milliseconds: Floats,
    per_key: float,
    doubts: Floats,
    noise: float,
    observed: Floats,
    chosen: int,
) -> tuple[float, float]:
    """Correct the curve by a Kalman step on what one step says in comparison with others; returns the new `per_key`.

    `observed` holds width, prefix and log milliseconds of each step, `[num_steps, 3]`. Modifies `milliseconds` and
    `doubts`, which are independent variances.
    """
    unit = KEY_UNIT * milliseconds[0]
    slopes, excess = np.zeros((len(observed), doubts.size)), np.empty(len(observed))
    for i, (width, prefix, log_milliseconds) in enumerate(observed):
        at, one, other = _parts(widths, milliseconds, int(width))
        rows = width * prefix / 1000.0
        expected = one + other + rows * per_key
        slopes[i, at] = one / expected
        if other:
            slopes[i, at + 1] = other / expected
        slopes[i, -1] = rows * unit / expected
        excess[i] = log_milliseconds - np.log(expected)
    surprise = max(-MOST_SHORTER, min(MOST_LONGER, float(excess[chosen] - np.median(excess))))
    difference = slopes[chosen].copy()
    for slope in slopes:
        difference -= slope / len(observed)
    weighted = doubts * difference
    gains = weighted / ((difference * weighted).sum() + noise)
    doubts[:] = np.minimum(doubts - gains * weighted + MORE_DOUBT, DOUBT)
    moved = np.exp(surprise * gains[:-1])
    milliseconds *= moved / moved[0]
    per_key = per_key / moved[0] + surprise * gains[-1] * unit
    _keep_bounds(widths, milliseconds)
    return max(0.0, min(float(milliseconds[0]), per_key)), surprise


@compiled
def _keep_bounds(widths: Int64s, milliseconds: Floats) -> None:
    """Bound each width's cost by that of the next narrower one."""
    for i in range(1, widths.size):
        parts = (widths[i] + widths[i - 1] - 1) // widths[i - 1]
        lowest, highest = FLOOR * milliseconds[i - 1], CEILING * parts * milliseconds[i - 1]
        milliseconds[i] = max(lowest, min(highest, milliseconds[i]))


# Probes of other widths

EVERY = 48
"""Steps between two probes of a width."""

SOON = 8
"""Steps between a probe that surprised and the next one."""

STALE = 192
"""Steps after which a width's cost is doubted: after n times as many steps it is hoped to cost an n-th."""

FIRST_AGE = 256
"""Steps for which no width is taken to have been measured when an engine starts."""

LEAST_HOPE = 0.1
"""Least share of its believed cost that a width is hoped to cost."""

SURPRISE = 0.75
"""Share of the believed time below which a probe was a surprise."""

PROBED_SHARE = 0.01
"""What probes may lose, as a share of the time of all steps."""


class Probes:
    """Decides when to probe, and what may be hoped for; all times in milliseconds."""

    def __init__(self) -> None:
        self._steps = self._next_probe = 0
        self._elapsed = self._lost = 0.0
        self._believed: float | None = None
        self._seen = dict.fromkeys(WIDTHS, -FIRST_AGE)

    @property
    def due(self) -> bool:
        """Whether enough steps went by since the last probe."""
        return self._steps >= self._next_probe

    def hopeful(self, costs: Floats, rows_beside: int) -> Floats:
        """The costs of `rows_beside` rows and 1, 2, ... more, lower where they were not measured for a while."""
        hoped = costs.copy()
        for first, last in zip((0, *WIDTHS), WIDTHS, strict=False):
            age = self._steps - self._seen[last]
            if age > STALE:
                hope = max(LEAST_HOPE, STALE / age)
                hoped[max(0, first - rows_beside) : max(0, last - rows_beside)] *= hope
        return hoped

    def affords(self, loss: float, believed: float) -> bool:
        """Whether a plan that is believed to take so long, and to lose `loss` of it, may run as a probe."""
        self._next_probe = self._steps + EVERY
        if self._lost + loss > PROBED_SHARE * self._elapsed:
            return False
        self._lost, self._believed = self._lost + max(0.0, loss), believed
        return True

    def observe(self, width: int, milliseconds: float) -> None:
        """Take note of a step; a probe that took less than believed costs less, and another one follows soon."""
        self._steps += 1
        self._elapsed += milliseconds
        self._seen[WIDTHS[min(bisect_left(WIDTHS, width), len(WIDTHS) - 1)]] = self._steps
        if self._believed is not None and milliseconds < SURPRISE * self._believed:
            self._lost = max(0.0, self._lost - (self._believed - milliseconds))
            self._next_probe = self._steps + SOON
        self._believed = None
