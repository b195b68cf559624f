"""Bounds of bytes, number, age and tenant; a full disk, a read-only folder, a clock that jumps; a day of traffic."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.forked import run
from helpers.quick_store import quick_store

from precedent.cache import Bounds, Selection, SpeculationCache, SQLiteStore, verify_cache
from precedent.cache.index import SimilarityIndex
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import EMBEDDER, completion, ids_of, unit_vector

HOUR, DAY = 3600.0, 86_400.0


@dataclass
class Clock:
    """A clock that only moves when it is told to."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def add(store: SQLiteStore, number: int, tenant: str = "default", characters: int = 300) -> int:
    new = completion(number, tenant=tenant, query=f"{tenant} {number}", text="y" * characters)
    return store.insert(new, unit_vector(number), EMBEDDER)


def ids(store: SQLiteStore, tenant: str | None = None) -> list[int]:
    return sorted(ids_of(store.list(Selection(tenant=tenant))))


@pytest.mark.parametrize("wrong", ["max_bytes", "max_records", "max_age", "max_tenant_bytes"])
def test_a_bound_below_one_is_refused(wrong):
    for value in (0, -1, float("nan")):
        with pytest.raises(CacheError, match=f"{wrong}=.* must be at least 1"):
            SpeculationCache.open(embedder=HashEmbedder(), **{wrong: value})


def test_a_tenants_quota_takes_from_that_tenant_alone():
    store = SQLiteStore.open(bounds=Bounds(max_tenant_bytes=5_000))
    quiet = [add(store, n, "quiet") for n in range(10)]
    for n in range(100):
        newest = add(store, n, "busy")
        assert all(share.bytes <= 5_000 for share in store.stats().tenants)
    assert ids(store, "quiet") == quiet
    assert newest in ids(store, "busy")
    assert len(ids(store, "busy")) > 10
    assert add(store, 1000, "quiet", characters=6_000) == 0, "larger than its tenant's quota"
    assert ids(store, "quiet") == quiet
    store.close()


def test_saved_tokens_per_byte_decide_and_fade():
    store = SQLiteStore.open(bounds=Bounds(max_bytes=30_000))
    small, large = add(store, 1, characters=200), add(store, 2, characters=9_000)
    faded = add(store, 3)
    store.credit({small: (10, 0), large: (10, 0), faded: (1, 0)})
    for n in range(10, 400):
        add(store, n)
    left = ids(store)
    assert small in left
    assert large not in left, "the same saving in many times the bytes"
    assert faded not in left, "its savings lie far back"
    store.close()


def test_what_is_too_old_goes_when_the_cache_is_opened(tmp_path):
    store = SQLiteStore.open(tmp_path)
    add(store, 1)
    store.close()
    (stored,) = SQLiteStore.open(tmp_path).list()
    later = Clock(stored.created + 2 * DAY)
    store = SQLiteStore.open(tmp_path, bounds=Bounds(max_age=DAY), clock=later)
    assert ids(store) == []
    store.close()


def test_a_clock_that_jumps_backwards_loses_nothing_and_keeps_nothing_for_ever():
    clock = Clock(50 * DAY)
    store = SQLiteStore.open(bounds=Bounds(max_age=DAY, max_records=100), clock=clock)
    before = [add(store, n) for n in range(5)]
    clock.now = 10 * DAY
    after = [add(store, n) for n in range(5, 10)]
    assert ids(store) == sorted(before + after)
    assert [one.id for one in store.since("default", "tok", before[-1])] == after, "ids order, not the clock"
    clock.now += 1.5 * DAY
    newest = add(store, 99)
    assert ids(store) == [newest], "40 days ahead of the clock, yet gone after a day"
    store.close()


def test_indexes_follow_the_evictions_of_a_full_cache(tmp_path, monkeypatch):
    """What they read of the rows is what came, not what is there."""
    store = quick_store(tmp_path, bounds=Bounds(max_records=50))
    index, memory = SimilarityIndex(store), TenantMemory()
    read, vectors_since, epochs = [], SQLiteStore.vectors_since, set()

    def counted(self, *arguments):
        found = vectors_since(self, *arguments)
        read.append(len(found[0]))
        return found

    monkeypatch.setattr(SQLiteStore, "vectors_since", counted)
    for n in range(1, 120):
        add(store, n)
        assert store.stats().records <= 50
        hits = [hit.completion_id for hit in index.search(unit_vector(n), "default", "tok", 1000)]
        memory.read(store, "tok")
        assert sorted(hits) == sorted(memory.index.lengths()) == ids(store)
        epochs.add(store.epoch())
    assert len(epochs) > 10, "there were many evictions"
    assert sum(read) < 3 * 120
    store.close()


def test_compacting_gives_back_what_evicted_completions_left(tmp_path):
    store = SQLiteStore.open(tmp_path)
    for n in range(100):
        add(store, n, characters=5_000)
    store.close()
    store = SQLiteStore.open(tmp_path, bounds=Bounds(max_records=10))
    add(store, 1000)
    kept = store.list()
    before, after = store.compact()
    assert after < before / 4
    assert store.list() == kept
    store.close()
    store = SQLiteStore.open(tmp_path, read_only=True)
    with pytest.raises(CacheError, match="read-only"):
        store.compact()
    store.close()


# --- disks that are full or may not be written ----------------------------------------------------------------------


# --- a day ----------------------------------------------------------------------------------------------------------


def day_of_traffic(folder: Path, requests: int) -> dict[str, int]:
    """A day on a fast clock: busy and quiet tenants, repeats, long and short answers, credit, two deletions."""
    choose, clock = random.Random(5), Clock()
    bounds = Bounds(max_bytes=400_000, max_records=900, max_age=6 * HOUR, max_tenant_bytes=150_000)
    store = quick_store(folder, bounds=bounds, clock=clock)
    index, most = SimilarityIndex(store), dict.fromkeys(("bytes", "records", "file"), 0)
    for n in range(requests):
        clock.now += DAY / requests
        tenant = choose.choices(("busy", "middle", "quiet"), (80, 18, 2))[0]
        number = choose.randrange(n + 1) if choose.random() < 0.3 else n
        row_id = add(store, number, tenant, characters=int(choose.lognormvariate(5.5, 1.0)))
        if choose.random() < 0.5:
            store.credit({row_id: (choose.randrange(40), choose.randrange(10))})
        if n % 50 == 0:
            hits = index.search(unit_vector(number), tenant, "tok", 10_000)
            assert {hit.completion_id for hit in hits} == set(ids(store, tenant))
            stats = store.stats()
            most = {
                "bytes": max(most["bytes"], stats.bytes),
                "records": max(most["records"], stats.records),
                "file": max(most["file"], stats.file_bytes),
            }
            assert all(share.bytes <= bounds.max_tenant_bytes for share in stats.tenants)
            assert all(one.created >= clock.now - bounds.max_age for one in store.list())
        if n in (requests // 3, requests // 2):
            store.forget(Selection(tenant="middle"))
    store.close()
    assert verify_cache(folder).findings == ()
    assert most["bytes"] <= bounds.max_bytes
    assert most["records"] <= bounds.max_records
    assert most["file"] < 20 * bounds.max_bytes
    print({"requests": requests, **most})
    return most


@pytest.mark.parametrize("requests", [1_000, pytest.param(40_000, marks=pytest.mark.stress)])
def test_a_day_of_traffic_stays_within_bounds(tmp_path, requests):
    assert day_of_traffic(tmp_path, requests)["bytes"] > 50_000


FULL_DISK = """
    import json, logging, resource, sys
    from precedent.cache import SQLiteStore
    from precedent_testing.store_contract import EMBEDDER, completion, unit_vector
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.levelname)
    logging.getLogger("precedent.cache").addHandler(handler)
    store = SQLiteStore.open(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    ids = [store.insert(completion(n, text="y" * 4000), unit_vector(n), EMBEDDER) for n in range(150)]
    store.credit({1: (1, 0)})
    stored = [row_id for row_id in ids if row_id]
    found = [one.id for one in store.since("default", "tok", 0)]
    print(json.dumps({"stored": stored, "found": found, "refused": ids.count(0), "warnings": warnings,
                      "read_only": store.stats().read_only}))
    store.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
def test_a_disk_that_runs_full_makes_the_cache_read_only_and_loses_nothing(tmp_path):
    """Files of this process may not grow beyond a million bytes."""
    ended = run(["-c", dedent(FULL_DISK), tmp_path])
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert len(said["stored"]) > 10 < said["refused"]
    assert said["found"] == said["stored"]
    assert said["warnings"] == ["WARNING"]
    assert said["read_only"]
    assert verify_cache(tmp_path).findings == ()
    store = SQLiteStore.open(tmp_path)
    assert ids(store) == said["stored"]
    assert add(store, 1000) > 0, "opened again with room, it stores"
    store.close()
