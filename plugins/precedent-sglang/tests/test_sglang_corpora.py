"""SGLang's external corpora: filled with what coming requests will want, within its rules; a server or store away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from helpers.sglang_fakes import FakeSGLangServer, on
from helpers.waiting import Waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.cache import Completion, SpeculationCache, tokenizer_fingerprint
from precedent.errors import CacheError, ConfigError, UnsupportedError
from precedent_sglang import Corpora, LoadInProgress, ServerError, SGLangServer
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer

FINGERPRINT = tokenizer_fingerprint(scripted_tokenizer())

Put = Callable[..., int]


def test_the_nearest_completions_are_loaded_the_nearest_last(
    fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put
) -> None:
    """Last, since SGLang prefers the continuation it saw last; what does not fit is left out."""
    put("your parcel was sent", query="where is my parcel")
    put("your money comes back", query="refund of a parcel")
    put("hello there", query="hello")
    filled = connect(max_tokens=10).refill(["where is my parcel"], tenant="north")
    assert on(fake) == [["your money comes back", "your parcel was sent"]]
    assert (filled.num_documents, filled.num_tokens, filled.truncated, filled.kept) == (2, 9, False, ())


def test_a_new_choice_replaces_the_old_one_and_the_same_choice_loads_nothing(
    fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put
) -> None:
    """The old corpus stays until the new one is there; other people's corpora stay altogether."""
    fake.corpora["their own"] = ["a b c"]
    put("one two")
    corpora = connect()
    first = corpora.refill(["an order"], tenant="north")
    assert corpora.refill(["an order"], tenant="north") == first
    assert fake.asked("/add_external_corpus") == 1
    put("three four")
    during = list[int]()
    fake.loading = lambda: during.append(len(fake.corpora))
    second = corpora.refill(["an order"], tenant="north")
    assert during == [2]
    assert set(fake.corpora) == {"their own", second.corpus_id}


def test_another_tenant_is_refused_by_name_everywhere(
    fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put
) -> None:
    """In a refill, in an expectation, and on a server that is filled for another one; nothing of it is ever sent."""
    put("one two")
    put("a secret", tenant="süd/1:x")
    corpora = connect()
    for refused in (corpora.refill, corpora.expect):
        with pytest.raises(UnsupportedError, match=r"tenant 'north' only.*give tenant 'süd/1:x' a server"):
            refused("an order", tenant="süd/1:x")
    corpora.refill(["an order"], tenant="north")
    other = connect(tenant="süd/1:x")
    with pytest.raises(UnsupportedError, match="drafts for tenant 'north' already"):
        other.refill(["an order"], tenant="süd/1:x")
    assert on(fake) == [["one two"]]
    fake.corpora.clear()
    other.refill(["an order"], tenant="süd/1:x")
    with pytest.raises(UnsupportedError, match="drafts for tenant 'süd/1:x' already"):
        corpora.refill(["an order"], tenant="north")


def test_completions_of_other_tokenizers_are_not_sent(
    fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put
) -> None:
    put("one two")
    put("of another", tokenizer="another")
    connect().refill([], tenant="north")
    assert on(fake) == [["one two"]]


def test_expected_requests_are_gathered_into_one_refill(
    fake: FakeSGLangServer, connect: Callable[..., Corpora], put: Put
) -> None:
    put("one two")
    background = Waiting()
    corpora = connect(executor=background)
    for query in ("an order", "a refund"):
        corpora.expect(query, tenant="north")
    assert len(background.waiting) == 1
    assert on(fake) == []
    background.run()
    assert on(fake) == [["one two"]]
    corpora.expect("an order", tenant="north")
    assert len(background.waiting) == 1
    corpora.close()
    background.run()
    corpora.expect("an order", tenant="north")
    assert background.waiting == []


@settings(max_examples=30, deadline=None)
@given(
    answers=st.lists(st.tuples(st.sampled_from(["an order", "a refund", "hello"]), st.integers(1, 9)), max_size=12),
    asked=st.lists(st.lists(st.sampled_from(["an order", "a refund"]), max_size=2), min_size=1, max_size=4),
    max_tokens=st.integers(1, 40),
)
def test_any_course_keeps_to_sglangs_rules(answers: Any, asked: Any, max_tokens: int) -> None:
    """At most one corpus of ours, within the bound, and nothing that SGLang refuses or leaves undefined."""
    fake = FakeSGLangServer(max_tokens=2 * max_tokens)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        server = SGLangServer("http://sglang", transport=fake.transport)
        with Corpora(server, cache, scripted_tokenizer(), tenant="north", max_tokens=max_tokens) as corpora:
            for number, queries in enumerate(asked):
                for query, words in answers[number :: len(asked)]:
                    ids = tuple(range(9 * number, 9 * number + words))
                    text = " ".join(f"{query[0]}{number}{word}" for word in range(words))
                    cache.insert(Completion(ids, FINGERPRINT, "", "north", query=query, text=text))
                filled = corpora.refill(queries, tenant="north")
                assert list(fake.corpora) == ([filled.corpus_id] if filled.num_documents else [])
                assert filled.num_tokens <= max_tokens


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
