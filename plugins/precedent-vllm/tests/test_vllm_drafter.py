"""A drafter in its worker: which one counts, which vLLM it serves, and what it does when something fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.vllm_fakes import NORTH, SECRET, FakeRunner, FakeVllm, config

from precedent.errors import CacheError, UnsupportedError
from precedent_engines import DraftingService
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_vllm import Drafter
from precedent_vllm.settings import Settings


def test_the_kill_switch_opens_no_store(runner: FakeRunner) -> None:
    drafter = Drafter(config(), FakeVllm(), Settings(on=False, store="/nowhere/at/all", secret=SECRET))
    runner.add("a", [1, 2, 3], NORTH)
    assert runner.step(drafter, {"a": [40]}) == {"a": []}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (1, 3)])
def test_one_worker_of_the_last_stage_counts(
    make: Callable[..., Drafter], runner: FakeRunner, tp: int, pp: int
) -> None:
    """Of it vLLM takes the drafts: the first tensor-parallel rank there (`_get_output_rank`)."""
    drafts = []
    for rank in range(tp * (pp - 1), tp * pp):
        runner = FakeRunner()
        runner.add("a", [1, 2, 3], NORTH)
        drafts.append(runner.step(make(rank=rank, tp=tp, pp=pp), {"a": [40]})["a"][:2])
    assert drafts == [[41, 42], *[[]] * (tp - 1)]


def test_drafting_that_fails_costs_drafts_only(
    drafter: Drafter, runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever vLLM hands over that nobody foresaw: its step goes on, the first failure is logged, all are counted."""
    runner.add("a", [1, 2, 3], NORTH)
    runner.step(drafter, {"a": [40]})
    del runner.requests["a"]
    assert drafter.propose([[41]], [5], [[0] * 5]) == [[]]
    assert drafter.propose([[41]], [5], [[0] * 5]) == [[]]
    assert caplog.text.count("drafting failed") == 1
    assert drafter.counts()["precedent:failed_steps"] == {"": 2}


def test_a_store_that_is_away_leaves_the_prompt(
    drafter: Drafter,
    runner: FakeRunner,
    service: DraftingService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is drafted from again once it answers; one warning for any number of requests."""

    def away(*_: Any, **__: Any) -> Any:
        raise CacheError("the database does not answer")

    assert service.cache is not None
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(service.cache, "since", away)
        patch.setattr(service.cache, "recall", away)
        for name in "abc":
            runner.add(name, [60, 61, 62, 63, 60, 61], NORTH)
            assert runner.step(drafter, {name: [62]})[name][:1] == [63]
    assert caplog.text.count("the store failed") == 1
    assert drafter.counts()["precedent:store_failures"][""] >= 3
    runner.add("d", [1, 2, 3], NORTH)
    assert runner.step(drafter, {"d": [40]})["d"][:2] == [41, 42]


@pytest.mark.parametrize(("of_two", "drafts"), [(1.1, True), (1e6, False)])
def test_a_given_step_cost_decides_what_pays(tmp_path: Path, runner: FakeRunner, of_two: float, drafts: bool) -> None:
    scripted_tokenizer().save_pretrained(tmp_path)
    given = config()
    given.model_config.tokenizer = str(tmp_path)
    drafter = Drafter(given, FakeVllm(), Settings(step_cost={1: 1.0, 2: of_two}, secret=SECRET))
    runner.add("a", [60, 61, 62, 63, 60, 61], NORTH)
    assert bool(runner.step(drafter, {"a": [62]})["a"]) is drafts
    drafter.close()


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"])
def test_known_versions_are_served(make: Callable[..., Drafter], version: str) -> None:
    vllm = FakeVllm(version)
    drafter = make(vllm)
    drafter.load_model(object())
    assert vllm.handed_to == [drafter]
    assert vllm.checked == 1


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.3.2", "1.0.0", "0.329.0", "", "dev"])
def test_an_unknown_version_is_refused_by_name(make: Callable[..., Drafter], version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"knows vLLM 0\.29, 0\.32, 0\.33") as refusal:
        make(FakeVllm(version))
    assert version in str(refusal.value)
