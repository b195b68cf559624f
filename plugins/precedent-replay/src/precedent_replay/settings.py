"""Settings of a replay: what a turn may see, the budget in nodes, the drafters, and the cost of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precedent.errors import ConfigError
from precedent.planning import Planner
from precedent.planning.costs import WIDTHS, CostCurve
from precedent.runtime.compiled import Floats
from precedent.runtime.machine_load import OtherPrograms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POOLS = ("online", "same-task", "other-tasks", "none")

CURVES = {
    "flat": {1: 1.0, 257: 1.0},
    "gpu": {1: 1.0, 16: 1.05, 32: 1.1, 64: 1.25, 128: 1.6},
    "cpu": {1: 1.0, 8: 1.0, 16: 1.25, 32: 1.8, 64: 2.9},
}
"""Named cost curves: time of a step by its width in tokens, relative to a step of one token.

`flat`: width costs nothing. `gpu`: a step bound by reading weights, plus a quarter of that time for every 64 tokens;
an assumption, not a measurement. `cpu`: bfloat16 on a 2-core machine.
"""

MEASURED = "measured"
"""The curve of `Settings.measured`."""

FURTHER_BASELINES = ("suffix-tree", "sglang", "adapld")
"""Optional baselines; `prompt-lookup` and `suffix` always take part."""

IDEAS = {
    "similarity": "recall without search: all completions weigh the same, except those of the very same prompt",
    "kinship": "recall that ignores workflow step, tools, record and age, and weighs words only",
    "exact": "recall that does not know which completions answered the very same prompt",
    "anchors": "nothing from recall before the answer's first token",
    "holes": "recall that cannot rejoin a completion after a name or number differed",
    "calibration": "the drafters' own estimates, nothing learned",
    "trust": "no per-request trust: a source's record within a request does not count",
}
"""What can be left out besides a whole drafter, which is given by name."""

IDEAS_OF_PLANNER = ("calibration", "trust")

ROUNDS = 4
"""Every round times each width, and the best time counts, because the first forward passes of a process are slower."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """A model's step times measured on this machine: milliseconds by width in tokens, from 1 on.

    `model` names the model and how it ran; `busy` is the share of the processors that other programs used meanwhile
    (None if unknown).
    """

    model: str
    milliseconds: Mapping[int, float]
    busy: float | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, name: str, most_nodes: int, progress: Callable[[int, int], None] = lambda *_: None
    ) -> MeasuredSteps:
        """Time forward passes from 1 token up to a tree of `most_nodes`; `progress(done, total)` counts rounds."""
        import torch

        from precedent.target import TargetModel

        narrower = [width for width in WIDTHS if width <= most_nodes]
        widths = [*narrower, *WIDTHS[len(narrower) : len(narrower) + 1]]
        target, others, best = TargetModel(model), OtherPrograms(), dict[int, float]()
        for number in range(ROUNDS):
            progress(number, ROUNDS)
            for width in widths:
                best[width] = min(best.get(width, float("inf")), target.measure_costs(width))
        threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
        how = f"{name} ({str(model.dtype).removeprefix('torch.')}, {model.device}{threads})"
        return cls(how, best, others.share())

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, for the results of a replay."""
        by_width = {width: round(time, 3) for width, time in self.milliseconds.items()}
        busy = None if self.busy is None else round(self.busy, 3)
        return {"model": self.model, "step_milliseconds_by_width": by_width, "others_cpu_share": busy}


@dataclass(frozen=True, slots=True)
class Settings:
    """How to replay: see `precedent replay --help`.

    `groups` restricts which turns are measured, not which are remembered. `baselines` are those besides `prompt-lookup`
    and `suffix`; None takes all. All drafters together are planned for each of `curves`; single
    drafters and ablations are planned for the first. With `measured`, the curve "measured" can be named too. With
    `one_path`, every contender proposes a single path, as for an engine that verifies no trees. `loop` names an
    installed package's decode loop, whose planner plans in place of the built-in one. Raises ConfigError for names that
    do not exist.
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
    one_path: bool = False
    loop: str | None = None

    def __post_init__(self) -> None:
        known("pool", [self.pool], POOLS)
        known("cost curve", self.curves, (*CURVES, *([MEASURED] if self.measured else [])))
        known("further baseline", self.baselines or (), FURTHER_BASELINES)
        known("part to leave out", self.ablate, (*IDEAS, *self.drafters))
        of_planner = [idea for idea in self.ablate if idea in IDEAS_OF_PLANNER]
        if self.loop is not None and of_planner:
            raise ConfigError(f"{' and '.join(of_planner)} cannot be left out of the planner of loop {self.loop!r}")
        self.planner_kind()
        if not self.budgets or min(self.budgets) < 1:
            raise ConfigError(f"a budget of {min(self.budgets, default=0)} nodes drafts nothing: give at least 1")
        if not self.alphas or min(self.alphas) <= 0:
            raise ConfigError("SuffixDecoding drafts nothing unless alpha is positive: give for instance 1,4,8")

    def as_dict(self) -> dict[str, Any]:
        """The settings that a reader of the results needs."""
        return {
            "pool": self.pool,
            "budgets": list(self.budgets),
            "curves": {name: self.times(name) for name in self.curves},
            "groups": len(self.groups),
            "measured": self.measured.as_dict() if self.measured else None,
            "loop": self.loop,
        }

    def planner_kind(self) -> Callable[[CostCurve], Planner]:
        """What makes the planner."""
        if self.loop is None:
            return Planner
        from precedent.decoding.loop import loop_class  # here: it loads torch

        return loop_class(self.loop).planner

    def times(self, curve: str) -> Mapping[int, float]:
        """Time of a step by its width in tokens, relative to a step of one token."""
        if curve == MEASURED and self.measured is not None:
            times = self.measured.milliseconds
            return {width: time / times[1] for width, time in times.items()}
        return CURVES[curve]

    def step_costs(self, curve: str) -> Floats:
        """Time of a step of 1, 2, … tokens, relative to one token; extrapolated beyond the curve's end."""
        return CostCurve.through(self.times(curve)).table


def known(kind: str, names: Sequence[str], there_are: Sequence[str]) -> None:
    """Raise ConfigError for a name that does not exist."""
    for name in names:
        if name not in there_are:
            raise ConfigError(f"there is no {kind} {name!r}; choose one of {', '.join(there_are)}")
