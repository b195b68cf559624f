"""Damage that passes a look: found when what is damaged is read, and never served."""

from __future__ import annotations

import sqlite3

import pytest
from helpers.cache_files import COUNT, PAGE, changed, damaged, fill, filled, tokens_in

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.records import vector_checksum
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, ids_of, unit_vector


def test_an_index_cannot_show_one_tenants_record_to_another(tmp_path):
    """Opening does not compare indexes with their table; records say themselves whose they are."""
    file = tmp_path / "precedent.sqlite"
    store = SQLiteStore.open(file)
    fill(store, tenant="shop-a")
    store.close()
    connection = sqlite3.connect(file)
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE type = 'index'").fetchall())
    connection.close()
    content = bytearray(file.read_bytes())
    for name in ("completion_partition", "completion_identity"):
        page = slice((roots[name] - 1) * PAGE, roots[name] * PAGE)
        content[page] = content[page].replace(b"shop-a", b"shop-b")
    file.write_bytes(content)
    store = SQLiteStore.open(file)
    assert all(one.tenant == "shop-b" for one in store.since("shop-b", "tok", 0))
    assert store.since("shop-b", "tok", 0) == []
    with pytest.raises(CacheError, match=r"names record \d+ wrongly|malformed"):
        store.insert(completion(3, 4, tenant="shop-b", text="text 3 " * 200), None, None)
    store.close()
    assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]


def test_storing_what_is_there_but_damaged_stores_it_anew(tmp_path):
    """Its row is found by its identity and served to nobody: counting it once more would store nothing."""
    file = filled(tmp_path)
    changed(file, "UPDATE completion SET text = 'other' WHERE id = 5")
    store = SQLiteStore.open(file)
    assert 5 not in ids_of(store.since("default", "tok", 0))
    row_id = store.insert(completion(4, 5, text="text 4 " * 200), unit_vector(4), EMBEDDER)
    assert row_id == COUNT + 1
    assert store.list(Selection(ids=(row_id,)))[0].token_ids == (4, 5)
    store.close()
    assert verify_cache(file).findings == ()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *[(name, f"CAST({name} AS BLOB)") for name in ("query", "text", "model", "tools", "tenant", "tokenizer")],
        *[
            (name, value)
            for name in ("count", "hits", "accepted", "rejected")
            for value in ("'x'", "-1", "x'00'", "0.5")
        ],
        *[("created", value) for value in ("'x'", "1e300", "-1e300", "x'00'")],
        ("count", "0"),
    ],
)
def test_a_value_of_another_kind_is_damage_though_the_checksum_holds(tmp_path, column, value):
    file = filled(tmp_path)
    changed(file, f"UPDATE completion SET {column} = {value} WHERE id = 5")
    store = SQLiteStore.open(file)
    assert 5 not in ids_of(store.list(Selection(), None))
    assert len(store.list(Selection(), None)) == COUNT - 1
    assert store.stats().records == COUNT
    store.close()
    report = verify_cache(file)
    assert [(finding.kind, finding.ids) for finding in report.findings] == [("record", (5,))]
    assert report.records == COUNT - 1
    assert tokens_in(file) == [n for n in range(COUNT) if n != 4]


@pytest.mark.parametrize(
    "value", ['{"name": 1, "fingerprint": "x", "dimension": 4}', "[" * 100_000, '{"name": "x"}', "7"]
)
def test_a_damaged_embedder_is_damage(tmp_path, value):
    file = filled(tmp_path)
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'embedder'", (value,))
    connection.close()
    damaged(file, "record of its embedder is damaged")


def test_vectors_of_another_dimension_are_left_out(tmp_path):
    """As after a log of another cache: each vector is whole, and together they are none."""
    file = filled(tmp_path)
    longer = unit_vector(1).tobytes() * 2
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(
        "UPDATE completion SET vector = ?, vector_checksum = ? WHERE id = 5", (longer, vector_checksum(longer))
    )
    connection.close()
    store = SQLiteStore.open(file)
    ids, vectors = store.vectors_since("default", "tok", 0)
    assert vectors.shape == (COUNT - 1, 4)
    assert 5 not in ids
    store.close()
