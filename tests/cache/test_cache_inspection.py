"""A cache is looked at as SQLite sees it, log included; a file that is refused is left as it was."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from helpers.cache_files import COUNT, PAGE, changed, contents, damaged, fill, filled, logged, refused, tokens_in, write

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.inspection import inspecting
from precedent.errors import CacheError, CacheMismatchError


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_checkpoint_that_was_cut_short_costs_nothing(tmp_path, share):
    """The file has grown to a part of what its header says, the last page is torn, and the log is whole."""
    found = logged(tmp_path / "a")
    begin, end = len(found[""]), len(found["folded"])
    torn = found["folded"][: begin + int(share * (end - begin)) - int(share * 100)]
    file = write(tmp_path / "b", {"": torn, "-wal": found["-wal"]})
    before = contents(file)
    assert verify_cache(file).findings == ()
    with pytest.raises(CacheMismatchError, match="embedder"):
        SQLiteStore.open(file, embedder=OtherEmbedder())
    assert contents(file) == before, "a look folds nothing in"
    assert tokens_in(file) == [*range(COUNT), *range(100, 100 + COUNT)]


class OtherEmbedder:
    name, fingerprint, dimension = "other", "other", 3

    def embed(self, texts):
        raise AssertionError("nothing is embedded")


def test_looking_while_another_process_writes_believes_no_torn_state(tmp_path):
    """One process stores and folds its log in without a pause, while this one looks at the files again and again."""
    code = """
        import sys, threading
        from precedent.cache import Bounds, Completion, SQLiteStore
        def opened():
            store = SQLiteStore.open(sys.argv[1], bounds=Bounds(max_records=60))
            store._database._writer.execute("PRAGMA wal_autocheckpoint=20")
            store._database._writer.execute("PRAGMA synchronous=OFF")
            return store
        store = opened()
        done = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
        number = 0
        while not done.is_set():
            number += 1
            store.insert(Completion((number,), "tok", "model", text="x" * 20_000), None, None)
            if number % 50 == 0:
                store.close()
                store = opened()
            if number == 50:
                print("ready", flush=True)
        store.close()
        print(number)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        for _ in range(40):
            with inspecting(tmp_path / "precedent.sqlite", whole=True) as connection:
                assert 50 <= connection.execute("SELECT count(*) FROM completion").fetchone()[0] <= 60
        written = int(writer.communicate("")[0])
    assert tokens_in(tmp_path / "precedent.sqlite")[-1] == written


@pytest.mark.parametrize("left", [b"", b"\x00"], ids=["no byte", "one byte"])
def test_sqlite_never_sees_an_empty_file_beside_its_log(tmp_path, left):
    """It would take the file for new and delete the log, which holds everything."""
    found = logged(tmp_path / "a")
    file = write(tmp_path / "b", {"": left, "-wal": found["-wal"]})
    damaged(file, "it is empty")


def test_a_file_that_lost_more_than_its_log_holds_is_damaged(tmp_path):
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    found = contents(file)
    store.close()
    file = write(tmp_path / "b", {"": found[""][: 5 * PAGE], "-wal": found["-wal"]})
    damaged(file, "pages are missing at its end, more than its log can hold")


def test_the_torn_end_of_a_log_is_no_damage(tmp_path):
    """A transaction that a power cut tore was never acknowledged: its last frame may be on disk without its first."""
    found = logged(tmp_path / "a")
    log = bytearray(found["-wal"])
    frames = (len(log) - 32) // (PAGE + 24)
    ends = [n for n in range(frames) if any(log[32 + n * (PAGE + 24) + 4 : 32 + n * (PAGE + 24) + 8])]
    begin = 32 + (ends[-2] + 1) * (PAGE + 24)
    assert ends[-1] > ends[-2] + 1, "the last transaction has several frames"
    log[begin + 200] ^= 1
    file = write(tmp_path / "b", {"": found[""], "-wal": bytes(log)})
    assert verify_cache(file).findings == ()
    assert len(tokens_in(file)) == 2 * COUNT - 1


def test_a_log_that_cannot_be_read_here_is_not_left_out_silently(tmp_path):
    """SQLite needs an index beside the log and may not make one; without the log half of the records would be gone."""
    found = logged(tmp_path / "a")
    file = write(tmp_path / "b", found)
    os.mknod(f"{file}-shm", stat.S_IFSOCK | 0o600)
    refused(file, "cannot be inspected now: unable to open database file; .* make it writable", CacheError)


@pytest.mark.parametrize("journal", ["hot", "hot, and a log"])
def test_what_another_program_would_roll_back_is_refused(tmp_path, journal):
    """SQLite rolls a journal into the file it lies beside, whosever it is."""
    other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    other.execute("CREATE TABLE t (x)")
    other.executemany("INSERT INTO t VALUES (?)", [("x" * 3000,) for _ in range(50)])
    other.execute("PRAGMA cache_size=2")
    other.execute("BEGIN")
    other.execute("UPDATE t SET x = upper(x)")
    planted = (tmp_path / "other.db-journal").read_bytes()
    other.execute("ROLLBACK")
    other.close()
    found = logged(tmp_path / "a")
    if journal == "hot":
        found = {"": found["folded"]}
    file = write(tmp_path / "b", {**found, "-journal": planted})
    refused(file, "another program left precedent.sqlite-journal", CacheError)


def test_a_file_that_another_program_switched_writes_a_log_again(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA journal_mode=DELETE")
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    assert Path(f"{file}-wal").stat().st_size > 0
    store.close()


def test_a_count_of_removals_below_one_that_was_used_is_damage(tmp_path):
    """The next removal would take a number that another one has."""
    file = filled(tmp_path)
    for row_id in (2, 3):
        with closing(SQLiteStore.open(file)) as store:
            store.forget(Selection(ids=(row_id,)))
    changed(file, "UPDATE meta SET value = 1 WHERE key = 'epoch'")
    damaged(file, "removals are counted up to 1, and the last one has number 2")
