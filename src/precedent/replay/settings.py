"""How to replay: what may be seen, how many nodes, who drafts, and what a step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precedent.errors import ConfigError
from precedent.planning.costs import CostCurve
from precedent.replay.pool import POOLS
from precedent.runtime.compiled import Floats

CURVES = {
    "flat": {1: 1.0, 257: 1.0},
    "gpu": {1: 1.0, 16: 1.05, 32: 1.1, 64: 1.25, 128: 1.6},
    "cpu": {1: 1.0, 8: 1.0, 16: 1.25, 32: 1.8, 64: 2.9},
}
"""Named cost curves: time of a step of so many tokens, one token being 1.

`flat`: width costs nothing. `gpu`: a step bound by reading weights, to which every 64 tokens add a quarter of it; an
assumption, not a measurement. `cpu`: bfloat16 on a 2-core machine.
"""

MEASURED = "measured"
"""The curve of `Settings.measured`."""

FURTHER_BASELINES = ("suffix-tree", "arctic")
"""Baselines beside `prompt-lookup` and `suffix`, which are always there."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What steps of a model were measured to take on this machine: milliseconds by width in tokens, from 1 on.

    `model` says which model and how it ran, `busy` is what other programs took of the processors meanwhile (None where
    nobody can tell).
    """

    model: str
    milliseconds: Mapping[int, float]
    busy: float | None = None

    @property
    def plain(self) -> float:
        """Milliseconds of a plain step."""
        return self.milliseconds[1]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON of a replay."""
        by_width = {width: round(time, 3) for width, time in self.milliseconds.items()}
        busy = None if self.busy is None else round(self.busy, 3)
        return {"model": self.model, "step_milliseconds_by_width": by_width, "others_cpu_share": busy}


@dataclass(frozen=True, slots=True)
class Settings:
    """How to replay: see `precedent replay --help`.

    `groups` restricts what is measured, not what is remembered. `baselines` are those beside `prompt-lookup` and
    `suffix`; None takes all that are installed. The planner chooses once for each of `curves`; what stands alone and
    what is ablated is planned for the first. With `measured` there is one more to name. Raises ConfigError for what
    does not exist.
    """

    pool: str = "online"
    budgets: tuple[int, ...] = (32,)
    drafters: tuple[str, ...] = ("recall", "prompt")
    alphas: tuple[float, ...] = (1.0,)
    limit: int | None = None
    curves: tuple[str, ...] = ("flat",)
    groups: frozenset[str] = frozenset()
    baselines: tuple[str, ...] | None = None
    ablate: tuple[str, ...] = ()
    measured: MeasuredSteps | None = None

    def __post_init__(self) -> None:
        """Check every setting that is a name or a number."""
        _known("pool", [self.pool], POOLS)
        _known("cost curve", self.curves, (*CURVES, *([MEASURED] if self.measured else [])))
        _known("further baseline", self.baselines or (), FURTHER_BASELINES)
        if not self.budgets or min(self.budgets) < 1:
            raise ConfigError(f"a budget of {min(self.budgets, default=0)} nodes drafts nothing: give at least 1")
        if not self.alphas or min(self.alphas) <= 0:
            raise ConfigError("SuffixDecoding drafts nothing unless alpha is positive: give for instance 1,4,8")
        if not self.curves:
            raise ConfigError(f"name a cost curve: {', '.join(CURVES)}")

    def as_dict(self) -> dict[str, Any]:
        """What a reader of the results must know."""
        return {
            "pool": self.pool,
            "budgets": list(self.budgets),
            "curves": {name: self.times(name) for name in self.curves},
            "groups": len(self.groups),
            "measured": self.measured.as_dict() if self.measured else None,
        }

    def times(self, curve: str) -> Mapping[int, float]:
        """Time of a step by its width in tokens, one token being 1."""
        if curve == MEASURED and self.measured is not None:
            return {width: time / self.measured.plain for width, time in self.measured.milliseconds.items()}
        return CURVES[curve]

    def cost_curve(self, curve: str) -> CostCurve:
        """A curve as the planner reads it."""
        cost = CostCurve()
        for width, time in self.times(curve).items():
            cost.observe(width, time)
        return cost

    def step_costs(self, curve: str) -> Floats:
        """Time of a step of 1, 2, … tokens, one token being 1; beyond the curve's end it rises on."""
        return self.cost_curve(curve).table


def _known(kind: str, names: Sequence[str], there_are: Sequence[str]) -> None:
    for name in names:
        if name not in there_are:
            raise ConfigError(f"there is no {kind} {name!r}; choose of {', '.join(there_are)}")
