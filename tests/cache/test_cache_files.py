"""A file that is no cache, or no longer one, is refused with one clear line and stays byte for byte what it was."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers.cache_files import damaged

from precedent.cache import Completion, Selection, SpeculationCache, SQLiteStore, verify_cache
from precedent.errors import CacheError, CacheMismatchError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import EMBEDDER, completion, ids_of, unit_vector


def filled(file: Path, count: int = 40) -> Path:
    """A closed cache with some completions."""
    store = SQLiteStore.open(file)
    for n in range(count):
        store.insert(completion(n, text="text " * 200), unit_vector(n), EMBEDDER)
    store.close()
    return file


def completion_as_stored(number: int, found: Completion) -> Completion:
    """What `filled` wrote, with the fields of `found` that the checksum does not cover."""
    record = ("id", "created", "count", "hits", "accepted", "rejected")
    return dataclasses.replace(
        completion(number, text="text " * 200), **{name: getattr(found, name) for name in record}
    )


def crashed(folder: Path) -> Path:
    """A cache whose process was killed: part of its records stand in the log alone."""
    code = """
        import os, signal, sys
        from precedent.cache import Completion, SpeculationCache
        from precedent_testing.embedders import HashEmbedder
        cache = SpeculationCache.open(sys.argv[1], embedder=HashEmbedder())
        cache.insert(Completion((1, 2), "tok", "model", query="what"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    return folder / "precedent.sqlite"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm")}


def assert_refused(file: Path, match: str, kind: type[CacheError] = CacheError) -> None:
    before = contents(file.parent)
    with pytest.raises(kind, match=match) as caught:
        SQLiteStore.open(file)
    assert "\n" not in str(caught.value)
    assert contents(file.parent) == before


@pytest.mark.parametrize(
    "content",
    [b"some notes of mine\n" * 50, b"SQLite format 3\x00", b"SQLite format 3\x00" + bytes(4096)],
    ids=["text", "magic only", "magic and zeros"],
)
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    file = tmp_path / "notes.sqlite"
    file.write_bytes(content)
    assert_refused(file, "is not a cache")


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_another_programs_database_is_refused(tmp_path, journal):
    file = tmp_path / "other.db"
    connection = sqlite3.connect(file)
    connection.execute(f"PRAGMA journal_mode={journal}")
    connection.execute("CREATE TABLE completion (id INTEGER PRIMARY KEY, tenant TEXT)")
    connection.commit()
    connection.close()
    assert_refused(file, "not a cache", CacheMismatchError)


def test_a_database_that_another_program_is_writing_is_refused(tmp_path):
    file = tmp_path / "other.db"
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode=wal")
    connection.execute("CREATE TABLE t (x)")
    assert_refused(file, "not a cache")
    connection.execute("INSERT INTO t VALUES (1)")
    connection.close()


def test_a_newer_format_is_refused(tmp_path):
    file = filled(tmp_path / "a.sqlite")
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version=999")
    connection.close()
    assert_refused(file, "format 999.*upgrade", CacheMismatchError)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_damaged(tmp_path, share):
    file = filled(tmp_path / "a.sqlite")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    damaged(file, ".")


def test_bytes_behind_the_end_do_no_harm(tmp_path):
    """A page that a full disk cut short lies behind the end that the header gives, until something is written there."""
    file = filled(tmp_path / "a.sqlite")
    file.write_bytes(file.read_bytes() + b"half a page" * 100)
    for _ in range(2):
        assert verify_cache(file).findings == ()
        store = SQLiteStore.open(file)
        assert store.insert(completion(100), unit_vector(1), EMBEDDER) == 41
        store.close()


def test_a_file_with_a_destroyed_page_is_refused(tmp_path):
    """Every page in turn (but for overflow pages, whose rows are known by their checksums) is overwritten."""
    content = filled(tmp_path / "a.sqlite", count=10).read_bytes()
    refused = 0
    for page in range(len(content) // 4096):
        file = tmp_path / "b.sqlite"
        file.write_bytes(content[: page * 4096] + b"\xff" * 4096 + content[(page + 1) * 4096 :])
        try:
            store = SQLiteStore.open(file, create=False)
        except CacheError:
            refused += 1
            continue
        expected = {(n,): "text " * 200 for n in range(10)}
        assert all(expected[one.token_ids] == one.text for one in store.since("default", "tok", 0))
        store.close()
    assert refused > 3


def test_a_flipped_bit_in_a_record_leaves_out_that_record_alone(tmp_path, caplog):
    file = filled(tmp_path / "a.sqlite")
    content = bytearray(file.read_bytes())
    at = content.find(unit_vector(7).tobytes())
    content[at] ^= 1
    content[content.find(b"query (9,)")] ^= 0x80  # no longer UTF-8
    file.write_bytes(content)
    store = SQLiteStore.open(file)
    assert [one.token_ids[0] for one in store.since("default", "tok", 0)] == [n for n in range(40) if n != 9]
    assert store.vectors_since("default", "tok", 0)[0].tolist() == [n + 1 for n in range(40) if n != 7]
    assert caplog.text.count("is damaged") == 2
    store.since("default", "tok", 0)
    assert store.list(Selection(containing="no such text"), None) == []
    assert caplog.text.count("is damaged") == 2
    assert store.forget(Selection(ids=(10, 8))) == 2
    store.close()


def test_damage_anywhere_is_refused_or_left_out_but_never_served(tmp_path):
    """One random byte of the file is changed, 150 times."""
    random = np.random.default_rng(0)
    content = filled(tmp_path / "a.sqlite", count=12).read_bytes()
    refused = left_out = 0
    for _ in range(150):
        changed = bytearray(content)
        changed[random.integers(len(content))] ^= random.integers(1, 256)
        (tmp_path / "b.sqlite").write_bytes(changed)
        try:
            store = SQLiteStore.open(tmp_path / "b.sqlite", create=False)
        except CacheError:
            refused += 1
            continue
        try:
            found = store.since("default", "tok", 0)
            ids, vectors = store.vectors_since("default", "tok", 0)
            assert len(store.list(Selection(containing="no such text"), None)) == 0
        except CacheError:
            refused += 1
        else:
            assert all(one == completion_as_stored(one.id - 1, one) for one in found)
            assert all((vector == unit_vector(i - 1)).all() for i, vector in zip(ids, vectors, strict=True))
            left_out += len(found) < 12 or len(ids) < 12
        store.close()
    assert refused > 0
    assert left_out > 0


def test_another_embedder_is_refused_when_opening(tmp_path):
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder(dimension=64)) as cache:
        cache.insert(completion(1))
    before = contents(tmp_path)
    for other in (HashEmbedder(dimension=32), HashEmbedder(salt="other")):
        with pytest.raises(CacheMismatchError, match=rf"hash-64-.*{other.fingerprint}.*give another path"):
            SpeculationCache.open(tmp_path, embedder=other)
    assert contents(tmp_path) == before


def test_a_refusal_does_not_even_fold_in_the_log_of_a_crash(tmp_path):
    file = crashed(tmp_path)
    before = contents(tmp_path)
    assert len(before["precedent.sqlite-wal"]) > 0
    with pytest.raises(CacheMismatchError, match="hash-32"):
        SpeculationCache.open(tmp_path, embedder=HashEmbedder(dimension=32))
    assert contents(tmp_path) == before
    store = SQLiteStore.open(file)
    assert ids_of(store.since("default", "tok", 0)) == [1]
    store.close()


def test_the_log_of_a_lost_file_is_not_replayed_into_a_new_one(tmp_path):
    file = crashed(tmp_path)
    file.rename(tmp_path / "moved.sqlite")
    with pytest.raises(CacheError, match="log of a cache file that is gone"):
        SQLiteStore.open(tmp_path)


def test_a_missing_file_is_not_created_unasked(tmp_path):
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(CacheError, match="there is no cache"):
            SQLiteStore.open(tmp_path / "none", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", "a\x00b", "x" * 5000])
def test_an_impossible_path_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheError):
        SQLiteStore.open(path)


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CacheError, match="cannot open"):
        SQLiteStore.open(tmp_path / "file" / "cache")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_cache_is_used_warns_once_and_stores_nothing(tmp_path, caplog):
    file = filled(tmp_path / "a.sqlite")
    before = file.read_bytes()
    store = SQLiteStore.open(file, read_only=True)
    assert len(store.since("default", "tok", 0)) == 40
    assert [store.insert(completion(100 + n), unit_vector(n), EMBEDDER) for n in range(3)] == [0, 0, 0]
    store.credit({1: (1, 1)})
    assert caplog.text.count("read-only") == 1
    with pytest.raises(CacheError, match="read-only"):
        store.forget(Selection(ids=(1,)))
    assert store.list(Selection(ids=(1,)), None)[0].accepted == 0
    store.close()
    assert file.read_bytes() == before


def test_a_file_that_may_not_be_written_opens_read_only(tmp_path, monkeypatch):
    file = filled(tmp_path / "a.sqlite")
    monkeypatch.setattr("precedent.cache.sqlite_store.os.access", lambda path, mode: Path(path) != file)
    store = SQLiteStore.open(file)
    assert store.stats().read_only
    assert store.insert(completion(100), unit_vector(1), EMBEDDER) == 0
    store.close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_may_not_be_written_opens_read_only(tmp_path):
    folder = tmp_path / "fixed"
    filled(folder / "a.sqlite")
    folder.chmod(0o555)
    store = SQLiteStore.open(folder / "a.sqlite")
    assert store.stats().read_only
    assert len(store.since("default", "tok", 0)) == 40
    store.close()
    folder.chmod(0o755)


def test_a_copy_of_a_closed_cache_is_a_cache(tmp_path):
    file = filled(tmp_path / "a.sqlite")
    shutil.copy(file, tmp_path / "b.sqlite")
    store = SQLiteStore.open(tmp_path / "b.sqlite")
    assert store.stats().records == 40
    store.close()
