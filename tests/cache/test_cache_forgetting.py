"""What was forgotten is in no file, and where another process keeps it, that is said."""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.forked import run
from helpers.quick_store import quick_store

from precedent.cache import Selection, SQLiteStore
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector


def raw(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm"))


def test_no_trace_is_left_in_pages_that_were_split_and_merged(tmp_path):
    """Overwriting deleted cells (secure_delete) is not enough: rebalanced pages keep old copies until a VACUUM."""
    draw = random.Random(2)
    store = quick_store(tmp_path)
    ids = []
    for n in range(800):
        tenant = f"{'SECRET' if draw.random() < 0.3 else ''}tenant{draw.randrange(40)}" + "q" * draw.randrange(60)
        text = "t" * draw.randrange(300)
        ids.append(
            store.insert(completion(n, tenant=tenant, query=tenant + "z" * draw.randrange(200), text=text), None, None)
        )
        if n % 3 == 0:
            store.credit({draw.choice(ids): (draw.randrange(1, 70_000), 1)})
        if n % 250 == 249:
            store.forget(Selection(containing=f"tenant{draw.randrange(9)}q"))
    assert b"SECRET" in raw(tmp_path)
    assert store.forget(Selection(containing="SECRET")) > 150
    assert b"SECRET" not in raw(tmp_path)
    store.close()


def test_forget_says_so_when_another_process_keeps_the_bytes(tmp_path, nobody_waits_long, monkeypatch, caplog):
    """Nothing else fails meanwhile, whenever the bytes are to be erased again."""
    monkeypatch.setattr("precedent.cache.sqlite_store.ERASED_AGAIN_AFTER", 0.0)
    store = SQLiteStore.open(tmp_path)
    row_id = store.insert(completion(1, text="secret"), unit_vector(1), EMBEDDER)
    reader = sqlite3.connect(tmp_path / "precedent.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM completion").fetchone()
    with pytest.raises(CacheError, match="run forget again"):
        store.forget(Selection(ids=(row_id,)))
    assert store.list(Selection(), None) == []
    assert store.insert(completion(2), None, None) == row_id + 1
    assert "an erasure failed again: " in caplog.text
    reader.execute("COMMIT")
    reader.close()
    assert store.forget(Selection(ids=(row_id,))) == 0
    assert b"secret" not in raw(tmp_path)
    store.close()


WITHOUT_ROOM = """
    import json, logging, os, resource, sys
    from precedent.cache import Selection, SQLiteStore
    from precedent.errors import CacheError
    from precedent_testing.store_contract import EMBEDDER, completion, unit_vector
    said = []
    logging.getLogger("precedent.cache").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    store = SQLiteStore.open(sys.argv[1])
    for n in range(60):
        store.insert(completion(n, text=f"secret {n} " + "y" * 4000), unit_vector(n), EMBEDDER)
    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    def forgotten():
        try:
            return store.forget(Selection(containing="secret 7 "))
        except CacheError as error:
            return str(error)
    limit(os.path.getsize(os.path.join(sys.argv[1], "precedent.sqlite-wal")) + int(sys.argv[2]))
    first = forgotten()
    refused = store.insert(completion(100), None, None)
    limit(resource.RLIM_INFINITY)
    again = forgotten() if sys.argv[3] == "forget" else None
    if sys.argv[3] == "insert":
        import precedent.cache.sqlite_store
        import time
        later = time.monotonic() + 3600
        time.monotonic = lambda: later
    stored = store.insert(completion(101), None, None)
    if sys.argv[3] == "close":
        store.close()
    names = [name for name in os.listdir(sys.argv[1]) if not name.endswith("-shm")]
    left = b"".join(open(os.path.join(sys.argv[1], name), "rb").read() for name in names)
    print(json.dumps([first, refused, again, stored, b"secret 7 " in left, said]))
"""


def without_room(folder: Path, more_bytes: int, then: str) -> list:
    """What `WITHOUT_ROOM` prints, where its files may not grow by more than so many bytes beyond the log's size."""
    ended = run(["-c", dedent(WITHOUT_ROOM), folder, more_bytes, then])
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
def test_a_cache_can_forget_after_a_full_disk_without_opening_it_again(tmp_path):
    first, refused, again, stored, left, said = without_room(tmp_path, 0, "forget")
    assert "free some disk space" in first
    assert (refused, again, left) == (0, 1, False)
    assert stored > 0, "it stores again, too"
    assert sum("is read-only" in line for line in said) == 1
    assert any("can be written again" in line for line in said)


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
@pytest.mark.parametrize("then", ["forget", "insert", "close"])
def test_an_erasure_that_a_full_disk_stopped_is_tried_again(tmp_path, then):
    """There is room to delete the record, and none to rewrite the file without its bytes."""
    first, _, again, stored, left, said = without_room(tmp_path, 120_000, then)
    assert "the records are forgotten, but" in first
    assert "erased later" in first
    assert not left
    assert again in (None, 0)
    assert then == "close" or stored > 0
    assert then == "forget" or any("the bytes of forgotten records are erased now" in line for line in said)
