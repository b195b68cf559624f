"""Which prefixes are kept, and when they are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kept import PREFIX, PROMPT, TOKENIZER, files_of, keep, kept_in, prefilled, tiny

from precedent.cache import SpeculationCache, never_store
from precedent.cache import prefixes as prefix_files
from precedent.engine import kept_prefixes
from precedent.engine.kept_prefixes import opened
from precedent.target import TargetModel
from precedent.target.prefix_pool import WORTH_KEEPING
from precedent_testing.embedders import HashEmbedder


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny())


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SpeculationCache]:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        yield cache


def test_short_and_incomplete_beginnings_are_not_kept(cache: SpeculationCache, target: TargetModel) -> None:
    kept = kept_in(cache, target)
    kept.keep("shop", prefilled(target), WORTH_KEEPING - 1)
    kept.keep("shop", prefilled(target, PROMPT[:80]), len(PREFIX))
    assert files_of(cache) == []


def test_it_is_written_once_and_again_when_it_has_gone(cache: SpeculationCache, target: TargetModel) -> None:
    file = keep(cache, target)
    written = file.stat().st_ino, file.stat().st_mtime_ns
    keep(cache, target)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == written
    file.unlink()
    assert keep(cache, target) == file


class Holding(Executor):
    """Runs nothing until it is told to."""

    def __init__(self) -> None:
        self.held: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.held.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        """Run what is held."""
        held, self.held = self.held, []
        for job in held:
            job()


def test_what_waits_to_be_written_is_bounded_and_each_waits_once(
    cache: SpeculationCache, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, executor = target.kv_shape.row_bytes, Holding()
    monkeypatch.setattr(kept_prefixes, "MAX_WAITING_BYTES", 250 * row)
    kept, slots = kept_in(cache, target, executor=executor), [prefilled(target, [n, *PROMPT]) for n in range(4)]
    for slot in (slots[0], slots[0], slots[1], slots[2]):
        kept.keep("shop", slot, 100)
    assert len(executor.held) == 2
    executor.run()
    assert len(files_of(cache)) == 2
    kept.keep("shop", slots[2], 100)
    executor.run()
    assert len(files_of(cache)) == 3


def test_a_forget_reaches_what_waits_to_be_written(cache: SpeculationCache, target: TargetModel) -> None:
    executor = Holding()
    kept_in(cache, target, executor=executor).keep("shop", prefilled(target), len(PREFIX))
    with SpeculationCache.open(cache.path, embedder=HashEmbedder()) as another:
        another.forget(tenant="shop")
    executor.run()
    assert files_of(cache) == []


def test_later_tokens_do_not_reach_the_copy(cache: SpeculationCache, target: TargetModel) -> None:
    """The slot goes on to serve others while its copy waits."""
    executor, slot = Holding(), prefilled(target)
    expected = slot.kv.copied(len(PREFIX))
    kept_in(cache, target, executor=executor).keep("shop", slot, len(PREFIX))
    target.prefill(slot, [7, *PROMPT])
    executor.run()
    (file,) = files_of(cache)
    assert all(map(torch.equal, opened(file.read_bytes(), file.stem, PREFIX), expected))


def test_what_redaction_would_touch_is_not_kept(tmp_path: Path, target: TargetModel) -> None:
    text, harmless = TOKENIZER.decode(PREFIX), "nowhere in it"
    assert harmless not in text
    for pattern, number in ((harmless, 1), ("(?s).", 0)):
        redact = never_store(pattern)
        with SpeculationCache.open(tmp_path / pattern, embedder=HashEmbedder(), redact=redact) as cache:
            kept_in(cache, target).keep("shop", prefilled(target), len(PREFIX))
            assert len(files_of(cache)) == number


def test_a_disk_that_runs_full_is_told_once_and_not_written_again(
    cache: SpeculationCache, target: TargetModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files, "new_file", fail)
    kept = kept_in(cache, target)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            kept.keep("shop", prefilled(target, [number, *PROMPT]), len(PREFIX))
    assert [record.getMessage() for record in caplog.records] == [
        "prefixes are no longer kept: [Errno 28] No space left on device"
    ]
