# ruff: noqa: D102 - a test's name says what it shows
"""The contract of every completion store: subclass `StoreContract` in a test module and define `open_store`.

class TestMyStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda: MyStore(tmp_path)  # a second call opens the same data again
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from precedent.cache import Completion, CompletionStore, EmbedderIdentity, Selection
from precedent.cache.records import ACTIONS
from precedent.errors import CacheError, CacheMismatchError

__all__ = ["DIMENSION", "EMBEDDER", "OpenStore", "StoreContract", "completion", "ids_of", "unit_vector"]

DIMENSION = 4
EMBEDDER = EmbedderIdentity("test", "fingerprint-of-test", DIMENSION)

OpenStore = Callable[[], CompletionStore]


def completion(*token_ids: int, **fields: Any) -> Completion:
    """A completion of tokenizer "tok" and model "model" with a distinct query."""
    defaults: dict[str, Any] = {
        "tokenizer": "tok",
        "model": "model",
        "query": f"query {token_ids}",
        "text": f"text {token_ids}",
    }
    return Completion(token_ids, **{**defaults, **fields})


def unit_vector(seed: int) -> np.typing.NDArray[np.float32]:
    """A random unit vector, `[DIMENSION]`."""
    vector = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def ids_of(found: list[Completion]) -> list[int]:
    """The ids of completions, in order."""
    return [one.id for one in found]


class StoreContract:
    """The tests; `persistent` says whether data outlive the store object."""

    persistent = True

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Override with a function that opens the same data on every call."""
        raise AssertionError("a store contract needs an `open_store` fixture")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[CompletionStore]:
        """An open, empty store."""
        store = open_store()
        yield store
        store.close()

    def add(self, store: CompletionStore, new: Completion, seed: int = 0) -> int:
        """Insert a completion with a random vector."""
        return store.insert(new, unit_vector(seed), EMBEDDER)

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

    # Forgetting, restoring, checking, closing

    def test_forget_takes_exactly_what_is_selected(self, store: CompletionStore) -> None:
        kept = self.add(store, completion(1, tenant="a", text="Straße 5"))
        named = self.add(store, completion(2, tenant="a", text="Hauptstrasse 7, 100%"))
        other = self.add(store, completion(3, tenant="b", query="HAUPTSTRASSE"))
        assert store.forget(Selection(tenant="a", containing="hauptSTRASSE")) == 1
        assert ids_of(store.list(Selection(), None)) == [other, kept]
        assert store.forget(Selection(containing="%")) == 0
        assert store.forget(Selection(ids=(other, 12345))) == 1
        assert ids_of(store.list(Selection(), None)) == [kept]
        assert named not in store.vectors_since("a", "tok", 0)[0]

    def test_forget_needs_a_condition(self, store: CompletionStore) -> None:
        self.add(store, completion(1))
        with pytest.raises(CacheError, match="condition"):
            store.forget(Selection())
        assert len(store.list(Selection(), None)) == 1

    def test_forget_before_a_time(self, store: CompletionStore) -> None:
        self.add(store, completion(1))
        (stored,) = store.list(Selection(), None)
        assert store.forget(Selection(before=stored.created)) == 0
        assert store.forget(Selection(before=stored.created + 1)) == 1

    def test_ids_are_never_used_again(self, store: CompletionStore) -> None:
        gone = self.add(store, completion(1))
        store.forget(Selection(ids=(gone,)))
        assert self.add(store, completion(1)) > gone

    def test_epoch_grows_when_records_go_and_stamp_when_they_come(self, store: CompletionStore) -> None:
        epoch, stamp = store.epoch(), store.stamp()
        row_id = self.add(store, completion(1))
        assert store.epoch() == epoch
        assert store.stamp() != stamp
        stamp = store.stamp()
        assert store.stamp() == stamp
        store.forget(Selection(ids=(row_id,)))
        assert store.epoch() > epoch
        assert store.stamp() != stamp

    def test_the_ids_of_a_partition_are_those_that_are_left(self, store: CompletionStore) -> None:
        ids = [self.add(store, completion(n)) for n in range(4)]
        self.add(store, completion(1, tenant="other"))
        store.forget(Selection(ids=(ids[1],)))
        assert store.ids("default", "tok").tolist() == [ids[0], *ids[2:]]
        assert store.ids("default", "other").tolist() == []

    def test_a_forget_is_told_from_an_eviction(self, store: CompletionStore) -> None:
        kept = self.add(store, completion(1))
        before = store.forgets()
        assert store.forgets() == before
        store.forget(Selection(ids=(kept,)))
        after = store.forgets()
        assert after != before
        store.forget(Selection(ids=(kept,)))
        assert store.forgets() != after  # what is gone already may still be in someone's memory

    def test_a_restored_record_keeps_its_time_and_counters_and_counts_once(self, store: CompletionStore) -> None:
        recorded = Completion((1, 2), "tok", "m", "a", "q", created=1e9, count=3, hits=2, accepted=9, rejected=4)
        fewer = replace(recorded, created=2e9, count=1, accepted=20)
        assert store.holds([recorded, completion(7)]) == [False, False]
        (row_id,) = store.restore([replace(recorded, vector=unit_vector(0))], EMBEDDER)
        assert store.restore([recorded, fewer], None) == [row_id, row_id]
        assert store.holds([recorded, completion(7)]) == [True, False]
        assert store.list(Selection(), None) == [replace(recorded, id=row_id, accepted=20)]
        assert store.insert(recorded, None, None) == row_id
        assert store.list(Selection(), None)[0].count == 4

    def test_restoring_is_all_or_nothing(self, store: CompletionStore) -> None:
        self.add(store, completion(9))
        good = Completion((1,), "tok", "model", created=1e9)
        with pytest.raises(CacheError):
            store.restore([good, replace(good, token_ids=(2,), hits=-1)], None)
        other = EmbedderIdentity("other", "else", DIMENSION)
        with pytest.raises(CacheMismatchError):
            store.restore([good, replace(good, token_ids=(2,), vector=unit_vector(0))], other)
        assert store.stats().records == 1

    def test_half_a_surrogate_is_replaced_in_every_text_and_every_question(self, store: CompletionStore) -> None:
        broken = replace(completion(1), tokenizer="tok\ud800", text="lone \udfff", query="half \ud83d")
        row_id = self.add(store, broken)
        (stored,) = store.since("default", "tok\ud800", 0)
        assert (stored.id, stored.query, stored.text) == (row_id, "half ?", "lone ?")
        assert store.vectors_since("default", "tok\ud800", 0)[0].tolist() == [row_id]
        assert store.holds([broken]) == [True]
        assert ids_of(store.list(Selection(containing="lone \udfff"), None)) == [row_id]
        assert store.forget(Selection(containing="half \ud83d")) == 1

    def test_a_sound_store_is_verified_and_compacted_without_a_loss(self, store: CompletionStore) -> None:
        ids = [self.add(store, completion(n)) for n in range(3)]
        report = store.verify()
        assert (report.sound, report.records, report.findings) == (True, 3, ())
        assert len(store.compact()) == 2
        assert ids_of(store.since("default", "tok", 0)) == ids

    def test_data_survive_closing(self, open_store: OpenStore) -> None:
        if not self.persistent:
            pytest.skip("this store keeps nothing")
        store = open_store()
        gone, kept = self.add(store, completion(1)), self.add(store, completion(2), seed=5)
        store.credit({kept: (3, 1)})
        store.forget(Selection(ids=(gone,)))
        before = store.list(Selection(), None)
        store.close()
        store.close()
        store = open_store()
        assert store.list(Selection(), None) == before
        np.testing.assert_array_equal(store.vectors_since("default", "tok", 0)[1], unit_vector(5)[None, :])
        assert self.add(store, completion(1)) > kept
        store.close()
