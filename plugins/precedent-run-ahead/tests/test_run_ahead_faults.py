"""Faults of whatever makes calls run ahead: no run fails or waits for long, and `degraded` names it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from itertools import repeat
from typing import Any

import pytest
from helpers.run_ahead_agents import READS, W7, Run, agent_of, in_turns, plain, saying, way
from helpers.scripted_agents import Desk, transcript

from precedent.cache import SpeculationCache
from precedent_run_ahead import RunAheadMiddleware, running
from precedent_testing.embedders import HashEmbedder

ANSWER = saying(W7)
NAN = float("nan")


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def answers(made: Any) -> Callable[..., Any]:
    return lambda *_, **__: made


class Unusable:
    """Everything that is asked of it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("injected")


@pytest.fixture(autouse=True)
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Work that hangs until the test is over. Whoever waits for it loses patience once it has begun, and no earlier."""
    hanging, go_on = threading.Event(), threading.Event()

    def patient(jobs: Any, timeout: float) -> Any:
        assert timeout == running.PATIENCE
        while not wait(jobs, timeout=0.001).done and not hanging.is_set():
            pass
        hanging.clear()
        return wait(jobs, timeout=0)

    def hangs(*_: Any, **__: Any) -> list[Any]:
        hanging.set()
        assert go_on.wait(60.0)
        return []

    monkeypatch.setattr(running, "wait", patient)
    yield hangs
    go_on.set()


@pytest.fixture(params=["sync", "astream"])
def run(request: pytest.FixtureRequest) -> Run:
    return way(request.param)


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as opened:
        yield opened


def check_runs(ahead: RunAheadMiddleware, run: Run, number: int = 3) -> None:
    """Several runs answer as without the middleware."""
    for _ in range(number):
        assert transcript(run(agent_of(Desk(), ANSWER, ahead))) == plain(ANSWER)


PREDICTORS: dict[str, Callable[..., Any]] = {
    "raises": raises,
    "nothing": answers(None),
    "NaN": answers(NAN),
    "a text": answers("look_up"),
    "calls that are NaN": answers([NAN]),
    "arguments that are NaN": answers([{"name": "look_up", "args": NAN}]),
    "calls that fail": answers([Unusable()]),
}


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_predictor_that_fails_fails_no_run(run: Run, name: str) -> None:
    ahead = RunAheadMiddleware(READS, predict=PREDICTORS[name])
    check_runs(ahead, run)
    assert ahead.faults == {"predict=": 3}, "switched off, it is asked no more"
    assert ahead.degraded == ("predict=",)


@pytest.mark.parametrize(
    "predicted",
    [[], repeat(W7), [{"name": NAN, "args": {}}], [{"name": "look_up", "args": {"order": "x" * 10**6}}]],
    ids=["empty", "without end", "a name that is NaN", "a huge argument"],
)
def test_a_predictor_that_is_wrong_changes_nothing(run: Run, predicted: Any) -> None:
    ahead = RunAheadMiddleware(READS, predict=answers(predicted))
    check_runs(ahead, run, 1)
    assert ahead.faults == {}


def test_a_predictor_that_hangs_delays_no_run_twice(run: Run, hang: Callable[..., Any]) -> None:
    ahead = RunAheadMiddleware(READS, predict=hang)
    check_runs(ahead, run)
    assert ahead.faults == {"predict=": 1}, "it is not asked again while it hangs"
    assert ahead.degraded == ("predict=",)


CACHES: dict[str, tuple[str, Any, int]] = {
    "recall fails": ("recall", raises, 3),
    "insert fails": ("insert", raises, 3),
    **{f"recall answers {made}": ("recall", answers(made), 3) for made in (None, NAN, [None], "x" * 9)},
    "recall hangs": ("recall", None, 1),
    "insert hangs": ("insert", None, 1),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_fails_or_hangs_fails_no_run_and_delays_none_twice(
    run: Run, name: str, cache: SpeculationCache, hang: Callable[..., Any]
) -> None:
    call, does, faults = CACHES[name]
    ahead = RunAheadMiddleware(READS, cache=cache, predict=in_turns([W7]))
    setattr(cache, call, does or hang)
    check_runs(ahead, run)
    assert ahead.faults == {"the memory of earlier runs": faults}, "while it hangs it is not asked again"
    assert ahead.degraded == ("the memory of earlier runs",)
    assert ahead.ledger.counts.used == 3, "the caller's predictions go on"
    delattr(cache, call)


def test_a_judge_of_runs_that_fails_fails_no_run(run: Run, cache: SpeculationCache) -> None:
    ahead = RunAheadMiddleware(READS, cache=cache, learn_from=raises)
    check_runs(ahead, run)
    assert ahead.degraded == ("the memory of earlier runs",)


@pytest.mark.parametrize("call", ["begin", "take", "asked"])
def test_a_ledger_that_fails_fails_no_run(run: Run, call: str) -> None:
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    setattr(ahead.ledger, call, raises)
    check_runs(ahead, run)
    assert ahead.degraded == ("running ahead",)
