"""The completion store on PostgreSQL: the contract of all stores, and what only a server can do wrong."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from precedent.cache import Bounds, Selection
from precedent.errors import CacheError, CacheMismatchError
from precedent_testing.store_contract import EMBEDDER, StoreContract, completion, ids_of, unit_vector

pytest.importorskip("precedent_postgres", reason="precedent-postgres is not installed")
from precedent.cache import SpeculationCache
from precedent_postgres import PostgresStore, testing
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import DIMENSION

pytestmark = pytest.mark.skipif(testing.why_not() is not None, reason=str(testing.why_not()))


@pytest.fixture
def store(url):
    store = PostgresStore(url)
    yield store
    store.close()


def add(store, new, seed: int = 0) -> int:
    return store.insert(new, unit_vector(seed), EMBEDDER)


class TestContract(StoreContract):
    @pytest.fixture
    def open_store(self, url):
        return lambda: PostgresStore(url)


def test_a_database_without_a_cache_is_left_without_one(url, server):
    store = PostgresStore(url, create=False)
    with pytest.raises(CacheError, match="there is no cache at postgresql://precedent@/precedent"):
        store.stats()
    store.close()
    assert server.execute("SELECT to_regnamespace('precedent')") == [(None,)]


def test_another_format_is_refused_and_left_untouched(store, server, url):
    row_id = add(store, completion(1))
    server.execute("UPDATE precedent.meta SET value = '99' WHERE key = 'format'")
    newer = PostgresStore(url)
    with pytest.raises(CacheMismatchError, match="format 99"):
        newer.since("default", "tok", 0)
    newer.close()
    assert server.execute("SELECT id FROM precedent.completion") == [(row_id,)]


PLANTED = """
CREATE FUNCTION precedent.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER planted BEFORE INSERT ON precedent.completion FOR EACH ROW EXECUTE FUNCTION precedent.nothing();
"""

FOREIGN = {
    "its table meta is not a cache's": "DROP TABLE precedent.meta; CREATE TABLE precedent.meta (id int)",
    "table meta is missing": "DROP TABLE precedent.meta",
    "table completion is not one of that format": "ALTER TABLE precedent.completion DROP COLUMN text",
    "table tenant is not one of that format": "ALTER TABLE precedent.tenant RENAME TO tenants; "
    "CREATE VIEW precedent.tenant AS SELECT * FROM precedent.tenants",
    "no epoch": "DELETE FROM precedent.meta WHERE key = 'epoch'",
    "format None": "DELETE FROM precedent.meta WHERE key = 'format'",
    "trigger planted": PLANTED,
    "rule planted": "CREATE RULE planted AS ON DELETE TO precedent.completion DO INSTEAD NOTHING",
    "policy planted": "CREATE POLICY planted ON precedent.completion USING (true)",
    "missing row security": "ALTER TABLE precedent.completion DISABLE ROW LEVEL SECURITY",
    "missing policy": "DROP POLICY one_tenant ON precedent.completion",
}


@pytest.mark.parametrize("said", FOREIGN)
def test_tables_that_are_not_ours_are_refused_and_left_untouched(store, server, url, said):
    """With the trigger, an insertion would return the id of nothing; without row security tenants see each other."""
    add(store, completion(1))
    server.execute(FOREIGN[said])
    reader = PostgresStore(url)
    with pytest.raises(CacheMismatchError, match=said) as caught:
        reader.since("default", "tok", 0)
    assert "\n" not in str(caught.value)
    reader.close()


def test_what_is_planted_while_the_store_is_open_is_a_clear_error(store, server):
    """Nobody is told that a record is stored which is not."""
    add(store, completion(1))
    server.execute(PLANTED)
    with pytest.raises(CacheError, match="the server stored nothing"):
        add(store, completion(2))
    server.execute("DELETE FROM precedent.meta WHERE key = 'epoch'")
    with pytest.raises(CacheError, match="a row that every cache has is missing"):
        store.epoch()


def test_many_engines_may_create_the_tables_at_once(url):
    stores = [PostgresStore(url) for _ in range(6)]
    ids = []
    threads = [threading.Thread(target=lambda n=n: ids.append(add(stores[n], completion(n)))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 6
    assert stores[0].stats().records == 6
    for store in stores:
        store.close()


def test_whoever_reads_up_to_an_id_has_missed_none_below_it(url):
    """Four engines write for one tenant while a fifth follows by ids alone."""
    stores = [PostgresStore(url) for _ in range(5)]
    follower, seen, last, done = stores.pop(), [], 0, threading.Event()

    def write(store, first):
        for n in range(15):
            add(store, completion(first, n))

    writers = [threading.Thread(target=write, args=(store, 100 + n)) for n, store in enumerate(stores)]
    for writer in writers:
        writer.start()
    while not done.is_set():
        done.set() if not any(writer.is_alive() for writer in writers) else None
        fresh = ids_of(follower.since("default", "tok", last))
        seen += fresh
        last = max([last, *fresh])
    assert seen == sorted(ids_of(follower.list(Selection(), None)))
    assert len(seen) == 60
    for store in (*stores, follower):
        store.close()


def test_the_server_itself_hides_other_tenants(store):
    """Row security, without any WHERE: hits and misses side by side."""
    mine = add(store, completion(1, tenant="mine"))
    other = add(store, completion(2, tenant="other"))
    count = "SELECT array_agg(id ORDER BY id) FROM precedent.completion"

    def seen(connection):
        return connection.execute(count).fetchone()[0]

    assert store._server.of_tenant("mine", seen) == [mine]
    assert store._server.of_tenant("other", seen) == [other]
    assert store._server.without_records(seen) is None
    assert store._server.of_every_tenant(seen) == [mine, other]
    assert store._server.of_tenant("mine", seen) == [mine]  # nothing of the transaction before is left


def test_forgotten_bytes_are_in_no_file_of_the_table(store, server):
    add(store, completion(1, text="the secret is Zyzzogeton"))
    kept = add(store, completion(2))

    def holding(needle: bytes) -> list[Path]:
        server.execute("CHECKPOINT")
        return [file for file in (server.data / "base").rglob("*") if file.is_file() and needle in file.read_bytes()]

    assert holding(b"Zyzzogeton") != []
    assert store.forget(Selection(containing="zyzzogeton")) == 1
    assert holding(b"Zyzzogeton") == []
    assert ids_of(store.list(Selection(), None)) == [kept]


def test_bounds_hold_and_a_quiet_tenant_keeps_its_records(url):
    store = PostgresStore(url, bounds=Bounds(max_bytes=20_000, max_records=60))
    quiet = add(store, completion(1, tenant="quiet"))
    for n in range(120):
        add(store, completion(*range(n, n + 50), tenant="busy"))
    stats = store.stats()
    assert stats.bytes <= 20_000
    assert stats.records <= 60
    assert ids_of(store.list(Selection(tenant="quiet"), None)) == [quiet]
    shares = store._server.without_records(
        lambda connection: connection.execute("SELECT tenant, records, bytes FROM precedent.tenant").fetchall()
    )
    assert {name: (records, size) for name, records, size in shares} == {
        share.tenant: (share.records, share.bytes) for share in stats.tenants
    }
    store.close()


def test_a_quota_bounds_one_tenant_and_a_large_completion_is_not_stored(url, caplog):
    store = PostgresStore(url, bounds=Bounds(max_tenant_bytes=3000))
    for n in range(40):
        add(store, completion(*range(n, n + 50), tenant="busy"))
    assert store.stats().bytes <= 3000
    assert add(store, completion(*range(1000))) == 0
    assert "was not stored" in caplog.text
    store.close()


def test_a_server_that_goes_away_is_one_warning_and_then_silence(server, url, caplog):
    store = PostgresStore(url)
    row_id = add(store, completion(1))
    server.stop()
    try:
        with caplog.at_level(logging.WARNING, "precedent.cache"):
            for _ in range(3):
                with pytest.raises(CacheError, match="postgresql://precedent@/precedent"):
                    store.since("default", "tok", 0)
    finally:
        server.start()
    assert [record.message.count("speculation goes on without it") for record in caplog.records] == [1]
    with pytest.raises(CacheError, match="a moment ago"):
        store.since("default", "tok", 0)
    store._server._silent_until = 0.0  # the pause is over
    assert ids_of(store.since("default", "tok", 0)) == [row_id]
    store.close()


def test_what_was_changed_behind_its_back_is_found_left_out_and_can_be_forgotten(store, server, caplog):
    record, vector, whole = (add(store, completion(n)) for n in (1, 2, 3))
    assert (store.verify().sound, store.verify().records) == (True, 3)
    server.execute(f"UPDATE precedent.completion SET text = 'changed' WHERE id = {record}")
    server.execute(f"UPDATE precedent.completion SET vector = 'changed' WHERE id = {vector}")
    found = store.verify()
    assert (found.sound, found.records) == (False, 2)
    assert {(one.kind, one.ids) for one in found.findings} == {("record", (record,)), ("vector", (vector,))}
    assert ids_of(store.since("default", "tok", 0)) == [vector, whole]
    assert ids_of(store.list(Selection(), None)) == [whole, vector]
    assert [one.id for one in store.records(Selection(), 0, 10)] == [vector, whole]
    assert store.vectors_since("default", "tok", 0)[0].tolist() == [record, whole]
    assert f"completion {record}" in caplog.text
    assert store.forget(Selection(ids=(record, vector))) == 2
    assert (store.verify().findings, ids_of(store.list(Selection(), None))) == ((), [whole])


def test_the_vectors_of_another_embedder_are_refused_at_the_first_question(url):
    with SpeculationCache.open(url, embedder=HashEmbedder(DIMENSION)) as cache:
        cache.insert(completion(1))
    with SpeculationCache.open(url, embedder=HashEmbedder(8)) as other, pytest.raises(CacheMismatchError, match="hash"):
        other.recall("anything", tenant="default", tokenizer="tok")


def test_a_read_only_store_serves_and_stores_nothing(store, url, caplog):
    row_id = add(store, completion(1))
    reader = PostgresStore(url, read_only=True)
    assert ids_of(reader.since("default", "tok", 0)) == [row_id]
    assert add(reader, completion(2)) == 0
    reader.credit({row_id: (1, 0)})
    with pytest.raises(CacheError, match="read-only"):
        reader.forget(Selection(ids=(row_id,)))
    assert caplog.text.count("read-only") == 1
    assert store.stats().records == 1
    reader.close()
