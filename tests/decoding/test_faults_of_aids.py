"""Faults of what an engine keeps, counts and measures: no request fails, and no answer changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.small_engines import PLAIN

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.metrics import MetricsRecorder
from precedent.engine.remembered_costs import RememberedCosts
from precedent.planning.costs import CostCurve
from precedent.planning.step_costs import StepCosts
from precedent.runtime.fence import Fences
from precedent.runtime.machine_load import CpuTimes
from precedent.runtime.team import Team
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

NAN = float("nan")
FIXED = list(b"You look up orders. Never guess a number. " * 3)
PROMPTS = [[*FIXED, *b"look up order 17, then order 18"], [*FIXED, *b"look up order 19, then order 20"]]
WAYS = (SamplingParams(max_tokens=8), SamplingParams(temperature=1.0, seed=3, max_tokens=8))
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=8)


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def answers(made: Any) -> Callable[..., Any]:
    return lambda *_, **__: made


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture(autouse=True)
def random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests without a seed draw the same random numbers.

    If their answers are those of a sound engine for whatever was drawn, their distribution is that engine's too.
    """
    monkeypatch.setattr("secrets.randbits", lambda bits: 0x5EED)


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Lets work that hangs end with the test."""
    made = threading.Event()
    yield made
    made.set()


def engine(**settings: Any) -> Engine:
    model = tiny_causal_lm("llama", seed=21, num_hidden_layers=2)
    settings = {"cost": CostCurve(), "fences": Fences(deadline=0.1), **settings}
    return Engine(model, byte_tokenizer(), name="tiny", **settings)


@cache
def plain_answers(*ways: SamplingParams) -> list[tuple[int, ...]]:
    with closing(engine()) as plain:
        return [plain.submit(prompt, way, speculation=PLAIN).result().token_ids for prompt in PROMPTS for way in ways]


def check_answers(tried: Engine, **settings: Any) -> None:
    """Answers of concurrent requests are those of plain decoding on a sound engine.

    With drafts that holds for greedy and seeded ones, without also for unseeded ones: what is drafted decides which
    random numbers are drawn.
    """
    for speculation, ways in ((SpeculationConfig(drafters=("prompt",)), WAYS), (PLAIN, (*WAYS, UNSEEDED))):
        running = [
            tried.submit(prompt, way, speculation=speculation, query="order", **settings)
            for prompt in PROMPTS
            for way in ways
        ]
        assert [each.result().token_ids for each in running] == plain_answers(*ways)
    unseeded = tried.submit(PROMPTS[0], UNSEEDED).result()
    assert len(unseeded.token_ids) == 8 or unseeded.finish_reason == "stop"  # it may draw the end token


# Kept prefixes


KEPT: dict[str, Any] = {
    "raises": raises,
    "nothing": answers(None),
    "NaN": answers(NAN),
    "empty": answers(b""),
    "huge": answers(b"x" * 10**7),
}


@pytest.mark.parametrize("call", ["read", "write", "holds", "discard", "generation"])
@pytest.mark.parametrize("kind", KEPT)
def test_kept_prefixes_that_fail_change_no_answer(kind: str, call: str, tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        assert cache.prefixes is not None
        setattr(cache.prefixes, call, KEPT[kind])
        with closing(engine(cache=cache, keep_prefixes=True)) as tried:
            check_answers(tried, prefix_tokens=len(FIXED))
            assert tried.metrics().num_requests_failed == 0
            if kind == "raises" and call in ("read", "holds"):
                assert tried.metrics().faults["kept prefixes"] >= 1, "the fault was met"
        delattr(cache.prefixes, call)


@pytest.mark.parametrize("kind", ["NaN", "empty", "huge", "zeros"])
def test_a_kept_prefix_that_is_damaged_changes_no_answer(kind: str, tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        assert cache.prefixes is not None
        with closing(engine(cache=cache, keep_prefixes=True)) as first:
            check_answers(first, prefix_tokens=len(FIXED))
        (file,) = cache.prefixes.path.glob("*/*")
        content = file.read_bytes()
        middle = len(content) // 2
        nan = content[:middle] + b"\xff\xff\xff\xff\xff\xff\xff\x7f" + content[middle + 8 :]
        file.write_bytes({"NaN": nan, "empty": b"", "huge": content * 20, "zeros": bytes(len(content))}[kind])
        with closing(engine(cache=cache, keep_prefixes=True)) as tried:
            check_answers(tried, prefix_tokens=len(FIXED))
            assert tried.health().status == "ok"


def test_a_prefix_whose_writing_hangs_delays_no_answer(go_on: threading.Event, tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        assert cache.prefixes is not None
        setattr(cache.prefixes, "write", lambda *_: go_on.wait(60.0))  # noqa: B010
        tried = engine(cache=cache, keep_prefixes=True)
        check_answers(tried, prefix_tokens=len(FIXED))
        go_on.set()
        tried.close()
        delattr(cache.prefixes, "write")


# Metrics


@pytest.mark.parametrize("call", ["stepped", "ended"])
def test_metrics_that_fail_change_no_answer(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsRecorder, call, raises)
    with closing(engine()) as tried:
        check_answers(tried)
        assert tried.health().degraded == ("metrics",)
        assert tried.metrics().faults == {"metrics": 3}


@pytest.mark.parametrize("number", [NAN, float("inf"), -1e300, 1e300, None], ids=str)
def test_times_that_cannot_be_change_no_answer(number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of a request are what the metrics read."""
    ended = MetricsRecorder.ended

    def of_other_times(self: MetricsRecorder, how: str, stats: Any, *others: Any) -> None:
        stats.queue_seconds = stats.first_token_seconds = stats.total_seconds = stats.plain_seconds = number
        ended(self, how, stats, *others)

    monkeypatch.setattr(MetricsRecorder, "ended", of_other_times)
    with closing(engine()) as tried:
        check_answers(tried)


# Remembered costs


COSTS: dict[str, Any] = {
    "raises": raises,
    "nothing": answers(None),
    "NaN": answers(NAN),
    "a text": answers("costs"),
    "another curve": answers(CostCurve()),
}


@pytest.mark.parametrize("kind", COSTS)
def test_remembered_costs_that_fail_change_no_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RememberedCosts, "read", COSTS[kind])
    monkeypatch.setattr(RememberedCosts, "write", raises)
    with closing(engine(cost=None)) as tried:
        check_answers(tried)
        assert isinstance(tried.planner.cost, StepCosts)


# The machine's load


def times(*numbers: Any) -> Callable[[], CpuTimes]:
    return lambda: CpuTimes(*numbers)


LOADS: dict[str, dict[str, Callable[[], Any]]] = {
    "reading raises": {"read": raises},
    "the clock raises": {"clock": raises},
    "the quota raises": {"quota": raises},
    "nothing": {"read": answers(None)},
    "a text": {"read": answers("busy")},
    "times that are NaN": {"read": times(NAN, NAN, NAN, 2)},
    "huge times": {"read": times(1e300, 1e300, 0.0, 10**9)},
    "no processors": {"read": times(1.0, 1.0, 1.0, 0)},
    "NaN processors": {"read": times(1.0, 1.0, 1.0, NAN)},
    "a clock that is NaN": {"clock": answers(NAN)},
    "a quota of NaN": {"quota": answers(NAN)},
    "a quota of nothing": {"quota": answers(0.0)},
    "a negative quota": {"quota": answers(-3.0)},
    "a huge quota": {"quota": answers(1e300)},
}


@pytest.mark.parametrize("name", LOADS)
def test_a_machine_load_that_fails_changes_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with closing(engine()) as tried:
        team = Team(**LOADS[name])
        tried.target.runner.team = team
        check_answers(tried)
        assert 1 <= team.size(2) <= 2


# Write-back


@pytest.mark.parametrize("made", [None, NAN, "", "x" * 10**7], ids=["nothing", "NaN", "empty", "huge"])
def test_what_write_back_answers_is_not_read(made: Any) -> None:
    with closing(engine()) as tried:
        check_answers(tried, write_back=answers(made))
        assert tried.health().status == "ok"
