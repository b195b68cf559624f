"""What a step costs, learned while it runs: a few parameters per size of team, and the machine's present load.

    milliseconds = load * (fixed part + rows * per row + bends + rows * prefix * per key)

Only the ratio between widths decides about a tree, and other programs slow down every width alike. So two things are
kept apart. The `load`, a factor, is the median over the last few steps. The shape of the curve is fitted by least
squares to times divided by the load of their moment; old steps fade, and a step that took far longer counts little.
All widths share the parameters, so what is seen at one informs the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

from precedent.planning.costs import WIDEST, WIDTHS, CostCurve
from precedent.runtime.compiled import Floats

START_UP_WIDTHS = (1, 4, 8, 32)
"""Widths measured before the first request."""

START_UP_SECONDS = 1.5
"""Time limit for measuring; each width runs at least once, and again as long as a whole round fits."""

BENDS = (4, 8, 48)
"""Widths at which the price of a row may change: where memory stops hiding rows, for small models and large ones, and
where other products begin."""

WINDOW = 7
"""Steps whose median gives the load. The middle one is learned from, once the steps around it are known."""

REMEMBERED = 0.995
"""Factor by which earlier steps are discounted with each step: about two hundred of them count."""

UNEXPLAINED = 0.3
"""Relative excess over the expected time at which a step counts half: other programs only add time."""

PRIOR_STEPS = 1.0
"""Steps that each width of the prior counts for."""

LOOSENESS = 4.0
"""Standard deviation of a parameter that nothing was measured for, as a multiple of the time of a single row."""

PER_KEY = 0.1
"""Share of a row's price that a thousand tokens before it are assumed to add."""

FIXED_BY_TEAM = 0.5
"""The fixed part is assumed to grow with this power as a team shrinks: memory, not threads, sets its pace."""

_SCALE = 8.0
_ROWS = np.arange(1.0, WIDEST + 1.0)


def _features(rows: Floats) -> Floats:
    """What a step's time is a sum of, all but the prefix's part: `[len(rows), 2 + len(BENDS)]`."""
    bends = [np.maximum(0.0, rows - bend) / _SCALE for bend in BENDS]
    return np.stack([np.ones(len(rows)), rows / _SCALE, *bends], axis=1)


_EVERY = _features(_ROWS)
_KEYS = _ROWS / _SCALE / 1000.0
NUM_PARAMETERS = _EVERY.shape[1] + 1


def _of(width: int, prefix: int) -> Floats:
    """The features of one step, `[NUM_PARAMETERS]`."""
    at = min(width, WIDEST) - 1
    return np.append(_EVERY[at], _KEYS[at] * prefix)


class _Shape:
    """Milliseconds without load for one size of team: least squares with a prior, and with forgetting."""

    def __init__(self, prior: Floats) -> None:
        known = np.stack([_of(width, 0) for width in START_UP_WIDTHS])
        times = np.maximum(1e-6, known @ prior)
        known /= times[:, None]
        loose = np.eye(NUM_PARAMETERS) / (LOOSENESS * times[0]) ** 2
        self._least = PRIOR_STEPS * known.T @ known + loose
        self._weight, self._moment = self._least.copy(), self._least @ prior
        self.parameters = prior

    def milliseconds(self, features: Floats) -> float:
        """The expected time of a step with these features."""
        return max(1e-6, float(features @ self.parameters))

    def table(self, prefix: int) -> Floats:
        """Milliseconds of 1, 2, ... rows, `[WIDEST]`; never decreases."""
        times = _EVERY @ self.parameters[:-1] + _KEYS * (prefix * self.parameters[-1])
        return np.maximum.accumulate(np.maximum(1e-6, times))

    def learn(self, features: Floats, milliseconds: float) -> None:
        """Learn a step's time; errors are relative, so that wide steps count no more than narrow ones.

        What no step says anything about stays where it is, however much is forgotten.
        """
        expected = self.milliseconds(features)
        excess = max(0.0, milliseconds / expected - 1.0)
        weight = 1.0 / (1.0 + (excess / UNEXPLAINED) ** 2) / max(1e-6, min(expected, milliseconds)) ** 2
        kept = (1.0 - REMEMBERED) * self._least
        self._weight = REMEMBERED * self._weight + kept + weight * np.outer(features, features)
        self._moment = REMEMBERED * self._moment + kept @ self.parameters + weight * milliseconds * features
        self.parameters = np.linalg.solve(self._weight, self._moment)


class _Step(NamedTuple):
    """One observed step; `ratio` is its time, divided by the time expected without load."""

    shape: _Shape
    features: Floats
    milliseconds: float
    ratio: float


class StepCosts(CostCurve):
    """The cost curve of one engine, refined with every step. `known` are the parameters of an earlier process."""

    learns = True

    def __init__(self, known: Mapping[int, Sequence[float]] | None = None) -> None:
        super().__init__()
        self._shapes = {threads: _Shape(np.array(values)) for threads, values in (known or {}).items()}
        self._recent: deque[_Step] = deque(maxlen=WINDOW)
        self._threads = max(self._shapes, default=1)
        self._widest, self.num_steps = max(START_UP_WIDTHS), 0
        self._update()

    def measure(self, run: Callable[[int], float], threads: Callable[[], int] = lambda: 1) -> None:
        """Fill the curve with `run(width) -> milliseconds`, the best of a few each, within about `START_UP_SECONDS`.

        `threads()` tells how many computed the last run.
        """
        deadline = perf_counter() + START_UP_SECONDS
        best = {width: run(width) for width in START_UP_WIDTHS}
        while perf_counter() < deadline - sum(best.values()) / 1e3:
            best = {width: min(before, run(width)) for width, before in best.items()}
        self.begin(best, threads())

    def begin(self, milliseconds: Mapping[int, float], threads: int = 1) -> None:
        """Start from the times of a few widths, computed by so many threads."""
        prior = _fitted(CostCurve.through(milliseconds).table)
        self._shapes, self._threads = {threads: _Shape(prior)}, threads
        self._update()

    @property
    def known(self) -> dict[int, list[float]]:
        """The parameters of each size of team, for a later process."""
        return {threads: shape.parameters.tolist() for threads, shape in self._shapes.items()}

    def behind(self, prefix: int) -> Floats:
        """The table for tokens that see `prefix` tokens before them."""
        shape = self._shapes.get(self._threads)
        return self.table if prefix == 0 or shape is None else self.load * shape.table(prefix)

    def observe(self, width: int, milliseconds: float, prefix: int = 0, threads: int = 1) -> None:
        """Learn the time of one forward, computed by so many threads."""
        if threads not in self._shapes:
            self._shapes[threads] = _Shape(self._supposed(threads, width, milliseconds))
        shape, features = self._shapes[threads], _of(width, prefix)
        self._recent.append(_Step(shape, features, milliseconds, milliseconds / shape.milliseconds(features)))
        self.load, self._threads = median(step.ratio for step in self._recent), threads
        if len(self._recent) == WINDOW:
            middle = self._recent[WINDOW // 2]
            middle.shape.learn(middle.features, middle.milliseconds / self.load)
        self._widest, self.num_steps = max(self._widest, width), self.num_steps + 1
        self._update()

    def as_dict(self) -> dict[int, float]:
        """Milliseconds at some widths, up to the widest seen, as the planner expects them now."""
        return {width: self.milliseconds(width) for width in WIDTHS if width <= self._widest}

    def _update(self) -> None:
        if self._threads in self._shapes:
            self.table = self.load * self._shapes[self._threads].table(0)

    def _supposed(self, threads: int, width: int, milliseconds: float) -> Floats:
        """Parameters for a new size of team, from the nearest one: each row's price is divided among the threads."""
        if not self._shapes:
            return _fitted(np.full(WIDEST, milliseconds))
        nearest = min(self._shapes, key=lambda other: abs(other - threads))
        parameters = self._shapes[nearest].parameters * (nearest / threads)
        parameters[0] *= (nearest / threads) ** (FIXED_BY_TEAM - 1.0)
        return parameters


def _fitted(table: Floats) -> Floats:
    """Parameters of a curve through a table's values at the widths of start-up, and bends elsewhere as in between."""
    at = np.array([1, *BENDS, WIDEST]) - 1
    parameters = np.linalg.solve(_EVERY[at], table[at])
    return np.append(parameters, PER_KEY * max(0.0, parameters[1]))
