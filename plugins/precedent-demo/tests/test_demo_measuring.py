"""How long the demo warms and measures: until its intervals are narrow, or its time is over, and no longer."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from precedent.cli.progress import Progress
from precedent.decoding.stats import GenerationStats
from precedent.engine.generation import GenerationResult
from precedent_demo import make_requests
from precedent_demo.demo_measuring import FEWEST_WARMED, MEASURING_SECONDS, DemoState, enough, measure, warm
from precedent_demo.demo_runs import WAYS, Run, Turn
from precedent_demo.speedup import FEWEST_FOR_INTERVAL

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
