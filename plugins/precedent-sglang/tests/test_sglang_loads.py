"""What SGLang refuses, leaves undefined or answers too late, and a server or store that is away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from helpers.services import Waiting
from helpers.sglang_fakes import FakeSGLangServer, on

from precedent.cache import SpeculationCache
from precedent.errors import CacheError, ConfigError, UnsupportedError
from precedent_sglang import Corpora, LoadInProgress, ServerError

Put = Callable[..., int]


def test_one_load_at_a_time(fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put) -> None:
    """While another one's load runs, ours is refused, what was loaded stays, and the next refill succeeds."""
    put("one two")
    corpora = connect()
    corpora.refill(["an order"], tenant="north")
    put("three four")
    fake.busy = True
    with pytest.raises(LoadInProgress, match="already in progress"):
        corpora.refill(["an order"], tenant="north")
    assert on(fake) == [["one two"]]
    fake.busy = False
    corpora.refill(["an order"], tenant="north")
    assert on(fake) == [["one two", "three four"]]


def test_nothing_is_removed_while_a_load_may_be_under_way(
    fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put, cache: SpeculationCache
) -> None:
    """A load whose answer was lost goes on in SGLang; a later load that is answered says that it is over."""
    old = put("one two")
    corpora = connect()
    first = corpora.refill(["an order"], tenant="north")
    put("three four")

    def lost() -> None:
        raise httpx.ReadTimeout("the answer was lost")

    fake.loading = lost
    with pytest.raises(ServerError, match="did not answer"):
        corpora.refill(["an order"], tenant="north")
    fake.loading, fake.busy = lambda: None, True  # it loads still
    cache.forget(tenant="north")
    assert corpora.refill(["an order"], tenant="north").kept == (first.corpus_id,)
    fake.busy = False
    assert put("five six") != old
    assert corpora.refill(["an order"], tenant="north").kept == ()
    assert on(fake) == [["five six"]]


def test_sglangs_own_bounds_are_reported(fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put) -> None:
    """SGLang counts tokens for itself: it may leave documents out, or have no room beside other corpora."""
    put("one two")
    put("three four")
    corpora = connect()
    fake.max_tokens = 3
    assert corpora.refill([], tenant="north").truncated
    fake.max_tokens = 5
    put("five six")
    with pytest.raises(ServerError, match="exceeds the remaining token budget"):
        corpora.refill([], tenant="north")


@pytest.mark.parametrize(
    ("info", "error", "message"),
    [
        ({"version": "0.5.22"}, UnsupportedError, r"knows SGLang 0\.5\.23, and this is 0\.5\.22"),
        ({"version": None}, UnsupportedError, "knows SGLang"),
        ({"speculative_algorithm": "EAGLE3"}, UnsupportedError, "speculates with EAGLE3"),
        ({"speculative_algorithm": None}, UnsupportedError, "speculates with nothing"),
        ({"speculative_ngram_external_sam_budget": 0}, UnsupportedError, "never drafts from its corpora"),
        ({"speculative_ngram_external_corpus_max_tokens": 199}, ConfigError, "max_tokens=100.*which is 199"),
    ],
)
def test_a_server_that_could_not_use_corpora_is_refused(
    connect: Callable[..., Corpora], info: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        connect(FakeSGLangServer(**info))


def test_a_key_is_sent_and_a_wrong_one_is_refused(connect: Callable[..., Corpora], put: Put) -> None:
    put("one two")
    server = FakeSGLangServer(key="secret")
    connect(server, key="secret").refill(["an order"], tenant="north")
    assert on(server) == [["one two"]]
    with pytest.raises(ServerError, match=r"\(401\): Unauthorized"):
        connect(server, key="wrong")


def test_a_server_or_store_that_is_away_is_logged_once_and_counted(
    fake: FakeSGLangServer,
    connect: Callable[..., Corpora],
    put: Put,
    cache: SpeculationCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put("one two")
    background = Waiting()
    corpora = connect(executor=background)

    def again() -> None:
        corpora.expect("an order", tenant="north")
        background.run()

    def away(*_: Any, **__: Any) -> Any:
        raise CacheError("the database does not answer")

    def unreachable(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(cache, "recall", away)
        again()
        again()
    assert (corpora.num_failures, corpora.health.failures) == (2, 2)
    assert caplog.text.count("the store failed") == 1
    again()
    assert on(fake) == [["one two"]]
    reached, corpora._server._client = (
        corpora._server._client,
        httpx.Client(base_url="http://sglang", transport=httpx.MockTransport(unreachable)),
    )
    with caplog.at_level(logging.WARNING):
        again()
        again()
    assert corpora.num_failures == 4
    assert caplog.text.count("cannot be reached") == 1
    corpora._server._client = reached
    again()
    assert corpora.num_failures == 4
