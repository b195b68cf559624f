"""How long the demo warms and measures, and how many times as fast one way is as another."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from precedent.cli.progress import Progress
from precedent.decoding.stats import GenerationStats
from precedent.engine.generation import GenerationResult
from precedent_demo import make_requests
from precedent_demo.demo_report import FEWEST_FOR_INTERVAL
from precedent_demo.demo_runs import (
    FEWEST_WARMED,
    MEASURING_SECONDS,
    WAYS,
    DemoState,
    Run,
    Sample,
    Turn,
    enough,
    measure,
    speedup,
    student_quantile,
    warm,
)

NAMES = [way.name for way in WAYS]


@dataclass
class ScriptedBench:
    """Every way answers each request alike, plain in twice the time."""

    engines: dict[str, None] = field(default_factory=lambda: dict.fromkeys(NAMES))
    runs: dict[str, Run] = field(default_factory=lambda: {name: Run(name) for name in NAMES})
    warmed: list[str] = field(default_factory=list)

    def measure(self, request: Any, desk: Any, name: str) -> None:
        seconds = 2.0 if name == "plain" else 1.0
        stats = GenerationStats(num_steps=9, num_output_tokens=100, decode_seconds=seconds, total_seconds=seconds)
        self.runs[name].requests.append([Turn((1,), GenerationResult("", (1,), ("target",), "stop", 1, 0, stats))])

    def warm(self, request: Any, desk: Any, middleware: Any) -> None:
        self.warmed.append(request.request_id)


@pytest.mark.parametrize(("adaptive", "number"), [(True, FEWEST_FOR_INTERVAL), (False, 6)])
def test_measuring_ends_once_the_intervals_are_narrow_or_with_the_requests(adaptive: bool, number: int) -> None:
    bench: Any = ScriptedBench()
    measure(bench, make_requests("B")[:6], Progress(), adaptive=adaptive)
    assert {len(run.requests) for run in bench.runs.values()} == {number}


@pytest.mark.parametrize(
    ("requests", "interval", "seconds", "stops"),
    [
        (4, [1.9, 2.2], 1, True),
        (4, [1.7, 2.3], 1, False),
        (4, [1.7, 2.3], MEASURING_SECONDS, True),
        (3, None, MEASURING_SECONDS, False),
        (3, None, 2 * MEASURING_SECONDS, True),
    ],
)
def test_it_lasts_until_the_verdict_is_sure_or_the_time_over(
    requests: int, interval: Any, seconds: float, stops: bool
) -> None:
    narrow = {"decode_speedup": 2.0, "request_speedup": 2.0, "request_speedup_interval": [2.0, 2.0]}
    runs = [narrow | {"name": name, "requests": requests, "decode_speedup_interval": interval} for name in NAMES]
    assert enough(runs, seconds) is stops


def test_a_second_demo_warms_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted, state = make_requests("A")[:10], DemoState("m")
    first, second, third = (ScriptedBench() for _ in range(3))
    assert warm(first, state, wanted, Progress(), seconds=-1) == FEWEST_WARMED  # type: ignore[arg-type]
    assert warm(second, DemoState("m"), wanted, Progress(), seconds=inf) == 10  # type: ignore[arg-type]
    assert first.warmed + second.warmed == [request.request_id for request in wanted]
    assert DemoState("another").warmed() == []
    next(tmp_path.rglob("warmed.json")).write_text("[")
    warm(third, state, wanted, Progress())  # type: ignore[arg-type]
    assert len(third.warmed) == 10, "a list that cannot be read is begun again"


SAMPLES = st.builds(Sample, st.integers(1, 500), st.floats(1e-3, 1e3))


@pytest.mark.parametrize("degrees", [3, 5, 14, 1000])
def test_quantiles_are_those_of_the_t_distribution(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(student.ppf(0.975, degrees), rel=0.01)


def test_the_ratio_is_that_of_the_totals_and_few_requests_have_no_interval() -> None:
    ratio, interval = speedup([Sample(10, 1.0), Sample(30, 1.0)], [Sample(10, 4.0), Sample(10, 4.0)])
    assert (ratio, interval) == (pytest.approx((40 / 2) / (20 / 8)), None)
    nothing, something = [Sample(0, 0.0)] * 5, [Sample(5, 1.0)] * 5
    assert speedup(nothing, something) == speedup(something, nothing) == (0.0, None)


@given(st.lists(SAMPLES, min_size=FEWEST_FOR_INTERVAL, max_size=12), st.floats(0.1, 10))
def test_long_and_short_requests_leave_no_doubt_where_each_gains_alike(plain: list[Sample], factor: float) -> None:
    _, interval = speedup([Sample(one.tokens, one.seconds / factor) for one in plain], plain)
    assert interval == pytest.approx((factor, factor))


@pytest.mark.parametrize("number", [4, 12])
def test_nineteen_of_twenty_intervals_hold_the_truth(number: int) -> None:
    chance, held, rounds = random.Random(number), 0, 1500
    for _ in range(rounds):
        sizes = [chance.randint(60, 200) for _ in range(number)]
        plain = [Sample(size, size * exp(chance.gauss(0, 0.05))) for size in sizes]
        mine = [Sample(size, size / 2 * exp(chance.gauss(0, 0.2))) for size in sizes]
        low, high = speedup(mine, plain)[1] or (0.0, 0.0)
        held += low <= 2 * exp((0.05**2 - 0.2**2) / 2) <= high
    assert 0.91 < held / rounds < 0.98
