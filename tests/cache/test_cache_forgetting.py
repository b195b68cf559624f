"""What was forgotten is in no file, and where another process keeps it, that is said."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from helpers.quick_store import quick_store

from precedent.cache import NewCompletion, Selection, SQLiteStore
from precedent.errors import CacheError
from precedent.testing.store_contract import EMBEDDER, completion, unit_vector


def raw(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm"))


def test_what_was_forgotten_is_not_in_the_raw_files(tmp_path):
    """Text, query, tenant, token ids and vector: all found in the files before, none of them after."""
    store = SQLiteStore.open(tmp_path)
    tokens = tuple(range(70_001, 70_040))
    secret = NewCompletion(tokens, "tok", "model", "secret tenant", "secret query", text="secret text" * 500)
    traces = [b"secret tenant", b"secret query", b"secret text", unit_vector(77).tobytes()]
    traces.append(b"".join(token.to_bytes(4, "little") for token in tokens))
    for n in range(30):
        store.insert(completion(n, tenant="other", text="kept text" * n), unit_vector(n), EMBEDDER)
    store.insert(secret, unit_vector(77), EMBEDDER)
    store.insert(completion(99, tenant="other"), unit_vector(99), EMBEDDER)
    assert all(trace in raw(tmp_path) for trace in traces)
    assert store.forget(Selection(containing="SECRET")) == 1
    assert [trace for trace in traces if trace in raw(tmp_path)] == []
    assert b"kept text" in raw(tmp_path)
    store.close()
    assert [trace for trace in traces if trace in raw(tmp_path)] == []


def test_no_trace_is_left_in_pages_that_were_split_and_merged(tmp_path):
    """Overwriting deleted cells (secure_delete) is not enough: rebalanced pages keep old copies until a VACUUM."""
    draw = random.Random(2)
    store = quick_store(tmp_path)
    ids = []
    for n in range(1500):
        tenant = f"{'SECRET' if draw.random() < 0.3 else ''}tenant{draw.randrange(40)}" + "q" * draw.randrange(60)
        text = "t" * draw.randrange(300)
        ids.append(
            store.insert(completion(n, tenant=tenant, query=tenant + "z" * draw.randrange(200), text=text), None, None)
        )
        if n % 3 == 0:
            store.credit({draw.choice(ids): (draw.randrange(1, 70_000), 1)})
        if n % 400 == 399:
            store.forget(Selection(containing=f"tenant{draw.randrange(9)}q"))
    assert b"SECRET" in raw(tmp_path)
    assert store.forget(Selection(containing="SECRET")) > 300
    assert b"SECRET" not in raw(tmp_path)
    store.close()


def test_forget_says_so_when_another_process_keeps_the_bytes(tmp_path, nobody_waits_long):
    store = SQLiteStore.open(tmp_path)
    row_id = store.insert(completion(1, text="secret"), unit_vector(1), EMBEDDER)
    reader = sqlite3.connect(tmp_path / "precedent.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM completion").fetchone()
    with pytest.raises(CacheError, match="run forget again"):
        store.forget(Selection(ids=(row_id,)))
    assert store.list(Selection(), None) == []
    reader.execute("COMMIT")
    reader.close()
    assert store.forget(Selection(ids=(row_id,))) == 0
    assert b"secret" not in raw(tmp_path)
    store.close()
