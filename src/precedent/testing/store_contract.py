# ruff: noqa: D102 - a test's name says what it shows
"""The contract of every completion store: subclass `StoreContract` in a test module and define `open_store`.

class TestMyStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda: MyStore(tmp_path)  # a second call opens the same data again
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from precedent.cache import CompletionStore, EmbedderIdentity, Selection
from precedent.cache.backend import ACTIONS
from precedent.errors import CacheError, CacheMismatchError
from precedent.testing.store_contract_keeping import KeepingContract
from precedent.testing.stores import DIMENSION, EMBEDDER, OpenStore, completion, ids_of, unit_vector

__all__ = ["DIMENSION", "EMBEDDER", "OpenStore", "StoreContract", "completion", "ids_of", "unit_vector"]


class StoreContract(KeepingContract):
    """The tests; `persistent` says whether data outlive the store object."""

    def test_a_completion_comes_back_as_it_was_stored(self, store: CompletionStore) -> None:
        new = completion(7, 0, 2**31 - 1, prompt_fingerprint="p", tools="t", workflow_step="w", text="ünï \x00 𝄞\n")
        row_id = self.add(store, new)
        (stored,) = store.since("default", "tok", 0)
        names = ("token_ids", "tokenizer", "model", "tenant", "query", "prompt_fingerprint", "tools", "text")
        assert [getattr(stored, name) for name in names] == [getattr(new, name) for name in names]
        assert (stored.id, stored.count, stored.hits, stored.accepted, stored.rejected) == (row_id, 1, 0, 0, 0)

    def test_ids_rise_and_since_gives_only_newer_ones(self, store: CompletionStore) -> None:
        ids = [self.add(store, completion(n)) for n in range(5)]
        assert ids == sorted(set(ids))
        assert ids_of(store.since("default", "tok", 0)) == ids
        assert ids_of(store.since("default", "tok", ids[2])) == ids[3:]
        assert store.since("default", "tok", ids[-1]) == []
        later = self.add(store, completion(99))
        assert ids_of(store.since("default", "tok", ids[-1])) == [later]

    def test_partitions_are_not_read_across(self, store: CompletionStore) -> None:
        keys = [(tenant, tokenizer) for tenant in ("a", "a ", "A", "b%", "b_") for tokenizer in ("t1", "t2")]
        ids = {key: self.add(store, completion(1, 2, tenant=key[0], tokenizer=key[1])) for key in keys}
        assert len(set(ids.values())) == len(keys)
        for key in keys:
            assert ids_of(store.since(*key, 0)) == [ids[key]]
            assert store.vectors_since(*key, 0)[0].tolist() == [ids[key]]
        assert store.since("c", "t1", 0) == []

    def test_tokenizers_are_those_of_the_stored_completions(self, store: CompletionStore) -> None:
        assert store.tokenizers() == frozenset()
        ids = [self.add(store, completion(1, tenant=name, tokenizer=f"t{n}")) for n, name in enumerate("aab")]
        assert store.tokenizers() == {"t0", "t1", "t2"}
        store.forget(Selection(ids=(ids[1],)))
        assert store.tokenizers() == {"t0", "t2"}

    def test_the_same_answer_to_the_same_query_is_counted(self, store: CompletionStore) -> None:
        first = self.add(store, completion(1, 2, query="q"))
        assert self.add(store, completion(1, 2, query="q")) == first
        other_query = self.add(store, completion(1, 2, query="r"))
        other_answer = self.add(store, completion(1, 3, query="q"))
        found = store.since("default", "tok", 0)
        assert [(one.id, one.count) for one in found] == [(first, 2), (other_query, 1), (other_answer, 1)]

    def test_vectors_come_back_and_completions_without_one_are_left_out(self, store: CompletionStore) -> None:
        with_vector = self.add(store, completion(1), seed=3)
        store.insert(completion(2, query=""), None, None)
        ids, vectors = store.vectors_since("default", "tok", 0)
        assert ids.tolist() == [with_vector]
        np.testing.assert_array_equal(vectors, unit_vector(3)[None, :])
        assert len(store.since("default", "tok", 0)) == 2

    def test_another_embedder_is_refused_and_nothing_is_stored(self, store: CompletionStore) -> None:
        self.add(store, completion(1))
        with pytest.raises(CacheMismatchError, match=r"'test'.*'other'"):
            store.insert(completion(2), unit_vector(0), EmbedderIdentity("other", "else", DIMENSION))
        assert len(store.since("default", "tok", 0)) == 1
        assert store.embedder() == EMBEDDER

    def test_an_agent_s_actions_are_kept_like_completions_and_apart_from_them(self, store: CompletionStore) -> None:
        action = completion(7, tokenizer=ACTIONS, text='{"events": [], "calls": [{"name": "look_up"}]}')
        answer, row_id = self.add(store, completion(7)), self.add(store, action)
        assert [one.text for one in store.since("default", ACTIONS, 0)] == [action.text]
        assert (ids_of(store.since("default", "tok", 0)), row_id > answer) == ([answer], True)
        assert store.forget(Selection(containing="look_up")) == 1
        assert store.since("default", ACTIONS, 0) == []

    def test_credit_adds_up_and_ignores_ids_that_are_gone(self, store: CompletionStore) -> None:
        row_id = self.add(store, completion(1))
        store.credit({row_id: (5, 1), 10**6: (1, 1)})
        store.credit({row_id: (0, 2)})
        (stored,) = store.since("default", "tok", 0)
        assert (stored.hits, stored.accepted, stored.rejected) == (1, 5, 3)
        with pytest.raises(CacheError, match="negative"):
            store.credit({row_id: (-1, 0)})

    def test_a_vector_of_another_length_is_refused(self, store: CompletionStore) -> None:
        with pytest.raises(CacheError, match="shape"):
            store.insert(completion(1), unit_vector(0)[:2], EMBEDDER)
        assert store.stats().records == 0

    def test_list_is_newest_first_and_limited(self, store: CompletionStore) -> None:
        ids = [self.add(store, completion(n)) for n in range(4)]
        assert ids_of(store.list(Selection(), 3)) == ids[:0:-1]
        assert ids_of(store.list(Selection(containing="TEXT (2"), None)) == [ids[2]]

    def test_stats_count_by_tenant(self, store: CompletionStore) -> None:
        row_id = self.add(store, completion(1, 2, 3, tenant="a"))
        self.add(store, completion(4, tenant="b"))
        store.credit({row_id: (2, 1)})
        stats = store.stats()
        assert (stats.records, stats.tokens, stats.embedder) == (2, 4, EMBEDDER)
        shares = {one.tenant: (one.records, one.tokens, one.hits, one.accepted, one.rejected) for one in stats.tenants}
        assert shares == {"a": (1, 3, 1, 2, 1), "b": (1, 1, 0, 0, 0)}
        assert stats.bytes == sum(one.bytes for one in stats.tenants) > 4 * 4 + 2 * 4 * DIMENSION

    @pytest.mark.parametrize(
        "wrong",
        [{"token_ids": ()}, {"token_ids": (-1,)}, {"token_ids": (2**31,)}, {"tokenizer": ""}]
        + [{"tenant": name} for name in ("", "x" * 201, "a\nb", "a\x00b", "\ud800")],
    )
    def test_a_completion_that_is_not_valid_is_refused(self, store: CompletionStore, wrong: dict[str, object]) -> None:
        with pytest.raises(CacheError):
            store.insert(replace(completion(1), **wrong), unit_vector(0), EMBEDDER)  # type: ignore[arg-type]
        assert store.stats().records == 0

    def test_lone_surrogates_are_replaced(self, store: CompletionStore) -> None:
        self.add(store, completion(1, query="a\ud800b", text="\udfff"))
        (stored,) = store.since("default", "tok", 0)
        assert (stored.query, stored.text) == ("a?b", "?")

    def test_many_threads_lose_nothing(self, store: CompletionStore) -> None:
        shared = self.add(store, completion(1))

        def work(thread: int) -> None:
            for n in range(10):
                self.add(store, completion(thread, n))
                store.credit({shared: (1, 0)})
                store.since("default", "tok", 0)

        threads = [threading.Thread(target=work, args=(10 + n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = store.since("default", "tok", 0)
        assert len(found) == 41
        assert next(one.accepted for one in found if one.id == shared) == 40

    def test_records_are_read_in_pages_with_their_vectors(self, store: CompletionStore) -> None:
        ids = [self.add(store, completion(n, tenant="ab"[n % 2]), seed=n) for n in range(5)]
        first = store.records(Selection(), 0, 3)
        assert [record.id for record in first] == ids[:3]
        rest = store.records(Selection(), ids[2], 3)
        assert [record.id for record in rest] == ids[3:]
        np.testing.assert_array_equal(first[1].vector, unit_vector(1))
        only = store.records(Selection(tenant="b", containing="TEXT (3"), 0, 9)
        assert [record.id for record in only] == [ids[3]]

    def test_a_closed_store_says_so(self, open_store: OpenStore) -> None:
        store = open_store()
        store.close()
        with pytest.raises(CacheError, match="closed"):
            store.since("default", "tok", 0)
