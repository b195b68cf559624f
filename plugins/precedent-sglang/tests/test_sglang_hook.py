"""The hook in its process: which SGLang it serves, what it opens, and what it does when something fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.sglang_fakes import Scheduler, worker_of

from precedent.errors import CacheError, ConfigError, UnsupportedError
from precedent_engines import DraftingService
from precedent_sglang.hook import Hook
from precedent_sglang.plugin import WORKER, SGLang, register
from precedent_sglang.settings import Settings
from precedent_testing.embedders import HashEmbedder

ORDER = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 2]


class FakeSGLang(SGLang):
    """Notes what was wrapped."""

    def __init__(self, version: str = "0.5.23") -> None:
        self.said, self.wrapped = version, dict[str, Callable[..., Any]]()

    def version(self) -> str:
        return self.said

    def around(self, target: str, hook: Callable[..., Any]) -> None:
        self.wrapped[target] = hook


def test_the_workers_making_and_drafting_are_wrapped() -> None:
    sglang = FakeSGLang("0.5.23+cu130")
    register(sglang, Settings())
    assert {target.removeprefix(f"{WORKER}.") for target in sglang.wrapped} == {"__init__", "_prepare_draft_tokens"}
    assert WORKER == "sglang.srt.speculative.ngram_worker.NGRAMWorker"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.2", "0.6.0", "0.5.23.post1", "10.5.23", ""])
def test_an_unknown_version_is_refused_by_name(version: str) -> None:
    sglang = FakeSGLang(version)
    with pytest.raises(UnsupportedError, match=r"knows SGLang 0\.5\.23") as refusal:
        register(sglang, Settings())
    assert version in str(refusal.value)
    assert not sglang.wrapped


def test_the_kill_switch_wraps_nothing() -> None:
    sglang = FakeSGLang("9.9")
    register(sglang, Settings.read({"PRECEDENT_SGLANG": "off"}))
    assert not sglang.wrapped


@pytest.mark.parametrize("name", ["tp_size", "pp_size"])
def test_several_processes_of_one_model_are_refused_by_name(hook: Hook, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=2.*must agree"):
        worker_of(hook, **{name: 2})


def test_a_worker_opens_the_store_that_the_settings_name(tmp_path: Path, tokenizer: Any) -> None:
    """With the tokenizer of SGLang's model; the prompt's end is recall's query."""
    tokenizer.save_pretrained(tmp_path / "model")
    place = str(tmp_path / "cache.db")
    with DraftingService(place, tokenizer, embedder=HashEmbedder()) as service:
        service.write_back([1], ORDER, tenant="north", query="user: where").result()
    hook = Hook(Settings(store=place, tenant="north", embedder=HashEmbedder(), drafters=("recall",)))
    scheduler = Scheduler(worker_of(hook, model_path=str(tmp_path / "model")))
    scheduler.add("a", tokenizer("where is it")["input_ids"], ORDER)
    while scheduler.running:
        scheduler.step()
    assert hook.counts()["drafted_requests"] == 1
    assert hook.counts()["failed_steps"] == 0
    hook.close()
    hook.close()
    assert hook.counts() == {}


def test_a_store_that_is_away_leaves_sglangs_own_drafting(
    hook: Hook, service: DraftingService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for any number of requests, a count, and drafts from the store once it answers."""

    def away(*_: Any, **__: Any) -> Any:
        raise CacheError("the database does not answer")

    scheduler = Scheduler(worker_of(hook))
    scheduler.worker.ngram_corpus.follows[70] = [[71, 72]]
    assert service.cache is not None
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(service.cache, "since", away)
        patch.setattr(service.cache, "recall", away)
        for rid in "abc":
            scheduler.add(rid, [1, 2, 3], [70, 71, 72])
        assert scheduler.step() == {"a": 1, "b": 1, "c": 1}
    assert caplog.text.count("the store failed") == 1
    assert hook.counts()["store_failures"] >= 3
    assert hook.counts()["failed_steps"] == 0
    scheduler.add("d", [1, 2, 3], ORDER)
    assert scheduler.step() == {"d": 7}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PRECEDENT_SGLANG": "maybe"}, "must be on or off"),
        ({"PRECEDENT_SGLANG_STOER": "x"}, "PRECEDENT_SGLANG_STOER is no setting"),
        ({"PRECEDENT_SGLANG_STORE": "x"}, "needs PRECEDENT_SGLANG_TENANT"),
    ],
)
def test_settings_that_do_not_fit_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.read(environment)


def test_settings_are_read() -> None:
    said = {"STORE": " orders.db ", "TENANT": "north", "DRAFTERS": "recall, prompt", "EMBEDDER": ""}
    found = Settings.read({f"PRECEDENT_SGLANG_{name}": value for name, value in said.items()})
    assert found == Settings(store="orders.db", tenant="north", drafters=("recall", "prompt"))
