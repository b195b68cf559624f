"""Any LangChain vector store as similarity search: the same hits as our own index, and never another tenant's."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from precedent.cache import Completion, Selection, SpeculationCache, SQLiteStore
from precedent.errors import CacheError
from precedent.langchain import LangChainEmbedder, in_vector_store
from precedent_testing.embedders import HashEmbedder


class Hashed(Embeddings):
    """Deterministic embeddings without a model."""

    model = "hashed"

    def embed_documents(self, texts):
        return HashEmbedder().embed(texts).tolist() if texts else []

    def embed_query(self, text):
        return self.embed_documents([text])[0]


WORDS = [
    *("order", "refund", "parcel", "invoice", "address", "delay"),
    *("gift", "return", "colour", "size", "price", "stock"),
]


def new(n: int, tenant: str = "default", tokenizer: str = "tok", query: str | None = None) -> Completion:
    words = np.random.default_rng(n).choice(WORDS, 4)
    return Completion((n,), tokenizer, "model", tenant, " ".join(words) if query is None else query)


def opened(vector_store, path=None, **settings) -> SpeculationCache:
    similarity = in_vector_store(vector_store, **settings)
    return SpeculationCache.open(path, embedder=LangChainEmbedder(Hashed()), similarity=similarity)


@pytest.fixture
def vectors():
    return InMemoryVectorStore(Hashed())


@pytest.fixture
def cache(vectors):
    with opened(vectors) as cache:
        yield cache


def recalled(cache, query: str, tenant: str = "default", tokenizer: str = "tok", k: int = 5) -> list[int]:
    return [hit.completion_id for hit in cache.recall(query, tenant=tenant, tokenizer=tokenizer, k=k)]


def test_hits_are_those_of_the_built_in_search(cache):
    with SpeculationCache.open(embedder=LangChainEmbedder(Hashed())) as ours:
        for n in range(60):
            assert cache.insert(new(n, tenant="ab"[n % 2])) == ours.insert(new(n, tenant="ab"[n % 2]))
        for query in ("refund order", "gift return size", "nothing alike"):
            for tenant in "ab":
                expected = ours.recall(query, tenant=tenant, tokenizer="tok", k=60)
                found = cache.recall(query, tenant=tenant, tokenizer="tok", k=60)
                assert {hit.completion_id: pytest.approx(hit.similarity, abs=1e-6) for hit in found} == {
                    hit.completion_id: hit.similarity for hit in expected
                }
                assert sorted(found, key=lambda hit: -hit.similarity) == found


def test_a_tenant_finds_its_own_among_many_nearer_ones_of_others(cache):
    """The filter holds before the nearest are chosen; hit and miss side by side."""
    for n in range(50):
        cache.insert(new(n, tenant="crowd", query="refund order please"))
    mine = cache.insert(new(99, tenant="mine", query="parcel delay"))
    other = cache.insert(new(98, tenant="mine", tokenizer="other tok", query="refund order please"))
    assert recalled(cache, "refund order please", "mine", k=1) == [mine]
    assert recalled(cache, "refund order please", "mine", "other tok", k=1) == [other]
    assert recalled(cache, "refund order please", "nobody") == []
    assert len(recalled(cache, "refund order please", "crowd", k=9)) == 9


class Careless(InMemoryVectorStore):
    """Ignores the filter, as a store does that does not know its form."""

    def similarity_search_by_vector(self, embedding, k=4, filter=None, **kwargs):
        return super().similarity_search_by_vector(embedding, k=k)


def test_a_store_that_ignores_the_filter_leaks_nothing_and_is_named():
    with opened(Careless(Hashed())) as cache:
        cache.insert(new(1, tenant="other", query="refund order"))
        assert recalled(cache, "refund order", "other") != []
        with pytest.raises(CacheError, match="ignored the filter"):
            recalled(cache, "refund order", "mine")


def test_what_is_forgotten_is_deleted_there_before_it_returns(cache, vectors):
    kept = cache.insert(new(1, query="parcel delay"))
    cache.insert(new(2, query="the secret of Zyzzogeton"))
    assert len(recalled(cache, "secret")) == 2
    assert cache.forget(containing="zyzzogeton") == 1
    assert [doc["text"] for doc in vectors.store.values()] == ["parcel delay"]
    assert recalled(cache, "secret") == [kept]


def test_what_another_process_forgot_is_deleted_when_it_is_met(tmp_path, vectors):
    with opened(vectors, tmp_path) as cache, closing(SQLiteStore.open(tmp_path)) as other_process:
        kept, gone = cache.insert(new(1, query="parcel")), cache.insert(new(2, query="parcel"))
        assert recalled(cache, "parcel") == [gone, kept]
        other_process.forget(Selection(ids=(gone,)))
        assert recalled(cache, "parcel") == [kept]
        assert len(vectors.store) == 1
    late = opened(vectors, tmp_path)  # an engine that begins after this one too was forgotten
    with closing(SQLiteStore.open(tmp_path)) as other_process:
        other_process.forget(Selection(ids=(kept,)))
    assert recalled(late, "parcel") == []
    assert vectors.store == {}
    late.close()


class Remote(VectorStore):
    """A store that filters by metadata and cannot look documents up."""

    def __init__(self):
        self.inner, self.filters = InMemoryVectorStore(Hashed()), []

    def add_texts(self, texts, metadatas=None, *, ids=None, **kwargs):
        return self.inner.add_texts(texts, metadatas, ids=ids)

    def similarity_search_by_vector(self, embedding, k=4, filter=None, **kwargs):
        self.filters.append(filter)
        return self.inner.similarity_search_by_vector(
            embedding,
            k,
            filter=lambda document: all(document.metadata[name] == value for name, value in filter.items()),
        )

    def delete(self, ids=None, **kwargs):
        self.inner.delete(ids)

    def similarity_search(self, *args, **kwargs):
        raise AssertionError

    from_texts = similarity_search


def test_a_store_that_filters_by_metadata_and_cannot_look_documents_up_is_enough():
    with opened(remote := Remote()) as cache:
        ids = [cache.insert(new(1, tenant=tenant, query="refund order")) for tenant in ("a", "b")]
        assert [recalled(cache, "refund order", tenant) for tenant in ("a", "b", "c")] == [[ids[0]], [ids[1]], []]
        assert recalled(cache, "refund order", "a", k=0) == []
        assert remote.filters[0] == {"tenant": "a", "tokenizer": "tok"}


class Failing(InMemoryVectorStore):
    def similarity_search_by_vector(self, *args, **kwargs):
        raise ConnectionError("no route to host")


def test_a_store_that_fails_is_a_cache_error_and_insertion_goes_on():
    with opened(Failing(Hashed())) as cache:
        assert cache.insert(new(1)) == 1
        with pytest.raises(CacheError, match=r"Failing failed.*no route to host"):
            recalled(cache, "order")
