# ruff: noqa: D102 - a test's name says what it shows
"""The part of the store contract about what goes and what stays: forgetting, restoring, checking, closing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from precedent.cache import Completion, CompletionStore, EmbedderIdentity, Selection
from precedent.errors import CacheError, CacheMismatchError
from precedent.testing.stores import DIMENSION, EMBEDDER, OpenStore, WithStore, completion, ids_of, unit_vector


class KeepingContract(WithStore):
    """Tests that `StoreContract` inherits."""

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

    def test_what_went_is_known_one_by_one(self, store: CompletionStore) -> None:
        ids = [self.add(store, completion(n)) for n in range(4)]
        before = store.epoch()
        assert store.gone_since(before)[0] == before
        store.forget(Selection(ids=(ids[1],)))
        store.forget(Selection(ids=(ids[2], ids[3])))
        now, gone = store.gone_since(before)
        assert now == store.epoch()
        assert gone is not None
        assert sorted(gone.tolist()) == ids[1:]

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
        assert ids_of(store.since("default", "tok\ud800", 0)) == [row_id]
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
