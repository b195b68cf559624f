"""How long the demo warms and measures: until its intervals are narrow, or its time is over, and no longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("precedent_demo")

from precedent.cli.progress import Progress
from precedent.cli.speedup import FEWEST_FOR_INTERVAL
from precedent.decoding.stats import GenerationStats
from precedent.engine.generation import GenerationResult
from precedent.runtime.machine_load import CpuTimes
from precedent_demo import make_requests
from precedent_demo.demo_measuring import (
    FEWEST_WARMED,
    MEASURING_SECONDS,
    NARROW,
    WARMING_REQUESTS,
    measure,
    warm,
)
from precedent_demo.demo_report import NAMED
from precedent_demo.demo_runs import WAYS, Run, Turn, speedups

NAMES = [way.name for way in WAYS]
TOKENS = 100


class Said(Progress):
    """Keeps the lines instead of printing them."""

    def __init__(self) -> None:
        super().__init__(terminal=False)
        self.lines: list[str] = []

    def show(self, what: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        """Shows nothing."""

    def say(self, line: str) -> None:
        self.lines.append(line)


@dataclass
class ScriptedBench:
    """Answers each request in the seconds that `seconds(request number, way)` says; its clock runs meanwhile."""

    seconds: Callable[[int, str], float]
    engines: dict[str, None] = field(default_factory=lambda: dict.fromkeys(NAMES))
    runs: dict[str, Run] = field(default_factory=lambda: {name: Run(name) for name in NAMES})
    warmed: list[str] = field(default_factory=list)
    now: float = 0.0

    def measure(self, request: Any, desk: Any, name: str) -> None:
        run = self.runs[name]
        self._answer(run, self.seconds(len(run.requests), name))

    def warm(self, request: Any, desk: Any) -> None:
        self.warmed.append(request.request_id)
        self.now += self.seconds(len(self.warmed) - 1, "warm")

    def _answer(self, run: Run, seconds: float) -> None:
        self.now += seconds
        stats = GenerationStats(num_steps=9, num_output_tokens=TOKENS, decode_seconds=seconds, total_seconds=seconds)
        run.requests.append([Turn((1,), GenerationResult("", (1,), ("target",), "stop", 1, 0, stats))])

    def clock(self) -> float:
        return self.now


@dataclass
class Kept:
    """Remembers the warming requests as `DemoState` does."""

    names: list[str] = field(default_factory=list)

    def warmed(self) -> list[str]:
        return list(self.names)

    def mark_warmed(self, names: Sequence[str]) -> None:
        self.names = list(names)


def measured(bench: ScriptedBench, *, requests: int = 15, adaptive: bool = True, busy: float = 0.0) -> Said:
    """Measure at most so many requests while other programs take a share `busy` of the processors."""
    said, wanted = Said(), make_requests("B")[:requests]
    times = lambda: CpuTimes(bench.now, bench.now * (1 + 2 * busy), bench.now, 2)  # noqa: E731
    measure(bench, wanted, said, adaptive=adaptive, clock=bench.clock, read_times=times)  # type: ignore[arg-type]
    return said


def counts(bench: ScriptedBench) -> set[int]:
    return {len(run.requests) for run in bench.runs.values()}


def test_measuring_ends_once_the_intervals_are_narrow() -> None:
    bench = ScriptedBench(lambda number, way: 2.0 if way == "plain" else 1.0)
    said = measured(bench)
    assert counts(bench) == {FEWEST_FOR_INTERVAL}
    assert said.lines[-1] == (
        "after 4 requests, times as fast as plain: both 2.0 (2.0 to 2.0) in decoding, 2.0 (2.0 to 2.0) in all; "
        "repeat 2.0 (2.0 to 2.0) in decoding, 2.0 (2.0 to 2.0) in all"
    )


def test_requests_that_gain_differently_are_measured_until_time_is_over() -> None:
    bench = ScriptedBench(lambda number, way: 4.0 if way == "plain" else 1.0 + 2 * (number % 2))
    measured(bench, requests=40)
    (number,) = counts(bench)
    assert MEASURING_SECONDS <= bench.now < MEASURING_SECONDS + bench.now / number


def test_a_slow_machine_gets_twice_the_time_for_an_interval_and_no_more() -> None:
    reaches, does_not = (ScriptedBench(lambda number, way, s=s: s) for s in (11.0, 20.0))
    measured(reaches)
    measured(does_not)
    assert counts(reaches) == {FEWEST_FOR_INTERVAL}
    assert counts(does_not) == {3}
    assert does_not.now >= 2 * MEASURING_SECONDS


def test_no_figure_is_shown_beside_other_busy_programs() -> None:
    said = measured(ScriptedBench(lambda number, way: 1.0), busy=0.4)
    assert said.lines[0] == "after 1 request: no speed-up is shown, other programs use 40% of the CPU"


@given(st.lists(st.lists(st.floats(0.1, 60), min_size=5, max_size=5), min_size=15, max_size=15))
def test_no_request_too_few_and_none_too_many(times: list[list[float]]) -> None:
    bench = ScriptedBench(lambda number, way: times[number][NAMES.index(way)])
    measured(bench)
    (number,) = counts(bench)
    assert number == 15 or done(bench, number)
    assert not any(done(bench, fewer) for fewer in range(1, number))


def done(bench: ScriptedBench, number: int) -> bool:
    """Whether the first so many requests suffice, from their times alone."""
    first = {name: Run(name, run.requests[:number]) for name, run in bench.runs.items()}
    seconds = sum(sample.seconds for run in first.values() for sample in run.samples("total_seconds"))
    if seconds >= (MEASURING_SECONDS if number >= FEWEST_FOR_INTERVAL else 2 * MEASURING_SECONDS):
        return True
    found = [one for name in NAMED for one in speedups(first[name], first["plain"]).values()]
    return all(one.interval is not None and one.interval[1] <= (1 + NARROW) * one.ratio for one in found)


def warmed(bench: ScriptedBench, state: Kept, seconds: float) -> int:
    wanted = make_requests("A")[:WARMING_REQUESTS]
    return warm(bench, state, wanted, Said(), seconds=seconds, clock=bench.clock)  # type: ignore[arg-type]


def test_warming_ends_with_its_requests_or_its_time() -> None:
    quick, slow, very_slow = (ScriptedBench(lambda number, way, s=s: s) for s in (1.0, 5.0, 100.0))
    assert warmed(quick, Kept(), 45) == len(quick.warmed) == WARMING_REQUESTS
    assert warmed(slow, Kept(), 45) == len(slow.warmed) == 10
    assert warmed(very_slow, Kept(), 45) == len(very_slow.warmed) == FEWEST_WARMED


def test_a_second_demo_warms_only_what_is_missing() -> None:
    state, first, second = Kept(), ScriptedBench(lambda number, way: 5.0), ScriptedBench(lambda number, way: 5.0)
    warmed(first, state, 45)
    assert warmed(second, state, inf) == WARMING_REQUESTS
    assert first.warmed + second.warmed == [request.request_id for request in make_requests("A")[:WARMING_REQUESTS]]
    assert state.names == first.warmed + second.warmed
