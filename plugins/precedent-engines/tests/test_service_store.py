"""The store behind a service: off the path, shared with other processes, sometimes away, never of another tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.services import END, Serve, store
from helpers.waiting import Waiting

from precedent.cache import Completion, SpeculationCache, SQLiteStore, tokenizer_fingerprint
from precedent.errors import CacheError, CacheMismatchError
from precedent_engines import DraftingService
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

ORDER = [40, 41, 42, 43, 44, 45, END]
PROMPT = [50, 51, 52, 53, 50, 51]
ASKED: dict[str, Any] = {"tenant": "north", "query": "an order", "end_token_ids": [END]}


def test_neither_begin_nor_chain_waits_for_searching_and_reading(serve: Serve) -> None:
    """Nothing that the executor does is needed to go on; once it is done, it is drafted from."""
    executor = Waiting()
    service = serve(executor=executor)
    service.write_back([1], ORDER, tenant="north", query="an order")
    executor.run()
    session = service.begin("a", PROMPT, **ASKED)
    assert session.chain(2) == [52, 53]
    session.committed([40])
    session.chain(8)
    executor.run()
    session.committed([41])
    assert session.chain(8) == ORDER[2:]
    session.committed([42])
    session.end()
    assert executor.waiting, "and the credit is written later"
    executor.run()


def test_answers_that_another_process_wrote_are_read_without_waiting(serve: Serve, tmp_path: Path) -> None:
    """A second opening of the same file stands for the other process."""
    executor = Waiting()
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as mine:
        service = serve(mine, executor=executor)
        service.begin("a", PROMPT, **ASKED).end()
        executor.run()
        with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as theirs:
            other = serve(theirs)
            store(other, ORDER)
        session = service.begin("b", PROMPT, **ASKED)
        assert session.chain(2) == [52, 53], "not read yet"
        executor.run()
        session.committed([40])
        assert session.chain(8) == ORDER[1:]
        executor.run()


def test_a_service_opens_a_store_by_its_place_and_closes_it(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path, embedder=HashEmbedder()) as service:
        store(service, ORDER)
        cache = service.cache
        assert service.begin("a", [1], **ASKED).chain(8) == ORDER
    assert cache is not None
    with pytest.raises(CacheError, match="closed"):
        cache.stats()
    with SpeculationCache.open(None, embedder=HashEmbedder()) as open_cache:
        serve(open_cache).close()
        assert open_cache.stats().records == 0, "one that was given open stays its owner's"
    assert serve(str(tmp_path), embedder=HashEmbedder()).begin("a", [1], **ASKED).chain(8) == ORDER


# A store that is away


class Ailing(SQLiteStore):
    """A store that fails while it is `away`, as a server does."""

    away = False

    def _or_fail(self) -> None:
        if self.away:
            raise CacheError("the server does not answer")

    def since(self, *args: Any, **kwargs: Any) -> Any:
        self._or_fail()
        return super().since(*args, **kwargs)

    def insert(self, *args: Any, **kwargs: Any) -> int:
        self._or_fail()
        return super().insert(*args, **kwargs)

    def credit(self, *args: Any, **kwargs: Any) -> None:
        self._or_fail()
        super().credit(*args, **kwargs)

    def tokenizers(self) -> frozenset[str]:
        self._or_fail()
        return super().tokenizers()

    def embedder(self) -> Any:
        self._or_fail()
        return super().embedder()


@pytest.fixture
def ailing() -> Iterator[Ailing]:
    opened = Ailing.open(None)
    assert isinstance(opened, Ailing)
    yield opened
    opened.close()


def failures(service: DraftingService) -> tuple[int, bool]:
    found = service.metrics()
    return found.store_failures, found.store_away


def test_while_the_store_is_away_requests_go_on_and_it_is_said_once(
    serve: Serve, ailing: Ailing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = serve(SpeculationCache(ailing, HashEmbedder()))
    store(service, ORDER)
    for outage in range(1, 4):
        ailing.away = True
        for number in range(3):
            session = service.begin(f"{outage}-{number}", PROMPT, **ASKED)
            assert session.chain(2) == [52, 53], "what is in memory needs no store, and the prompt is there"
            session.committed([52])
            session.end()
        assert service.write_back([1], [60, 61], tenant="north").exception() is not None
        assert failures(service)[1]
        assert caplog.text.count("the store failed, drafting goes on") == outage
        ailing.away = False
        session = service.begin("back", [1], **ASKED)
        assert session.chain(8) == ORDER
        session.end()
        assert not failures(service)[1]
        assert caplog.text.count("the store answers again") == outage
    assert failures(service)[0] >= 3 * 4


def test_a_store_that_is_away_at_the_start_is_used_once_it_answers(serve: Serve, ailing: Ailing) -> None:
    ailing.away = True
    service = serve(SpeculationCache(ailing, HashEmbedder()))
    assert failures(service) == (2, True)
    assert service.begin("a", PROMPT, **ASKED).chain(2) == [52, 53]
    ailing.away = False
    new = Completion(tuple(ORDER), service._codec.fingerprint, "", tenant="north")
    ailing.insert(new, None, None)
    assert service.begin("b", [1], **ASKED).chain(4) == ORDER[:4]


# Tokenizers


def test_a_store_of_other_tokenizers_only_is_refused_and_left_alone(
    serve: Serve, cache: SpeculationCache, tokenizer: Any
) -> None:
    other = byte_tokenizer()
    cache.insert(Completion((1, 2), tokenizer_fingerprint(other), "m", text="kept"))
    with pytest.raises(CacheMismatchError, match="holds completions of other tokenizers only"):
        serve()
    assert [one.text for one in cache.list()] == ["kept"]
    store(serve(with_tokenizer=other), ORDER)
    cache.insert(Completion((3, 4), tokenizer_fingerprint(tokenizer), "m"))
    assert serve().begin("a", [1], **ASKED).chain(8) == [], "of two, each drafts from its own"


def test_a_store_that_was_opened_for_a_refused_service_is_closed_again(serve: Serve, tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        cache.insert(Completion((1, 2), "another", "m"))
    with pytest.raises(CacheMismatchError):
        serve(tmp_path, embedder=HashEmbedder())
    before = threading.active_count()
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        assert cache.stats().records == 1
    assert threading.active_count() <= before
