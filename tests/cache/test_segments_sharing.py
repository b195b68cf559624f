"""Several who seal, read, forget and are killed at once agree in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock
from helpers.quick_store import quick_store
from helpers.segments import (
    SECRET,
    TENANT,
    TOKENIZER,
    RowsRead,
    answer,
    as_bytes,
    files_of,
    memory_of,
    raw,
    stored,
    tokens_of,
)

from precedent.cache import Completion, Selection, SQLiteStore
from precedent.cache.segments import Segment, SegmentFiles
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.errors import CacheError


def test_the_loser_skips_sealing_and_a_forgetful_one_says_so(tmp_path, monkeypatch):
    """Somebody else holds the lock: sealing is left to them, forgetting reports what it could not erase."""
    monkeypatch.setattr("precedent.cache.segments.LOCK_SECONDS", 0.05)
    store = stored(tmp_path)
    memory = memory_of(store)
    memory.seal()
    store.insert(Completion(SECRET, TOKENIZER, "model", TENANT), None, None)
    memory.read(store, TENANT, TOKENIZER)
    with FileLock(tmp_path / "precedent.sqlite-index" / "lock"):
        assert not memory.seal()
        with pytest.raises(CacheError, match="run forget again"):
            store.forget(Selection(ids=(1,)))
    assert 1 not in [row.id for row in store.list()]
    assert as_bytes(answer(0)[:4]) in raw(tmp_path / "precedent.sqlite-index")
    assert store.forget(Selection(ids=(1,))) == 0
    assert as_bytes(answer(0)[:4]) not in raw(tmp_path / "precedent.sqlite-index")
    assert memory.seal()
    store.close()


def test_two_memories_of_one_file_complete_each_other(tmp_path):
    """As two processes would: each reads what the other sealed, and neither loses or doubles anything."""
    store, other = stored(tmp_path), SQLiteStore.open(tmp_path)
    mine, theirs = memory_of(store), memory_of(other)
    assert mine.seal()
    assert not theirs.seal()  # all of it is sealed already
    other.insert(Completion(SECRET, TOKENIZER, "model", TENANT), None, None)
    theirs.read(other, TENANT, TOKENIZER)
    assert theirs.seal()
    again = memory_of(store)
    assert tokens_of(again) == tokens_of(theirs)
    assert len(tokens_of(again)) == 41
    store.close()
    other.close()


@pytest.mark.parametrize("broken", ["write", "publish"])
def test_a_sealing_that_breaks_off_leaves_what_was(tmp_path, monkeypatch, broken):
    """A full disk at the worst moment: the earlier segments count, the rest is in the rows, its files go next time."""
    store = stored(tmp_path)
    memory_of(store).seal()
    store.insert(Completion(SECRET, TOKENIZER, "model", TENANT), None, None)
    memory, before = memory_of(store), files_of(store).listed()
    with monkeypatch.context() as patched:
        patched.setattr(SegmentFiles, broken, full_disk if broken == "publish" else half_written)
        with pytest.raises(OSError, match="full"):
            memory.seal()
    assert files_of(store).listed() == before
    assert tokens_of(memory_of(store)) == tokens_of(memory)
    assert memory.seal()
    listed = files_of(store).listed()
    assert [sealed.completions for sealed in listed] == [40, 1]
    assert len(list(files_of(store).folder.iterdir())) == 7
    store.close()


def full_disk(*_: object) -> None:
    raise OSError("the disk is full")


def half_written(files: SegmentFiles, segment: Segment) -> None:
    (files.folder / "0123456789abcdef.tokens.npy").write_bytes(segment.tokens.tobytes())
    raise OSError("the disk is full")


def test_a_segment_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """Another process merges what this one is about to open: nothing has to come from the rows."""
    store, rows = stored(tmp_path), RowsRead(monkeypatch)
    memory, listed, times = memory_of(store), SegmentFiles.listed, []
    memory.seal()

    def listed_too_early(files):
        found = listed(files)
        if not times:
            times.append(1)
            for sealed in found:
                files.publish([files.write(files.read(sealed))])
            files.erase_unlisted()
        return found

    monkeypatch.setattr(SegmentFiles, "listed", listed_too_early)
    rows.number = 0
    assert tokens_of(memory_of(store)) == tokens_of(memory)
    assert rows.number == 0
    store.close()


def test_many_who_seal_and_forget_at_once_agree_in_the_end(tmp_path):
    """Each with its own connection, as processes have: nothing is doubled, lost, or brought back."""
    stored(tmp_path, 1).close()
    forgotten: list[int] = []

    def work(number: int) -> None:
        store = quick_store(tmp_path)
        memory = TenantMemory(store.partition(TENANT, TOKENIZER))
        for turn in range(6):
            key = store.insert(
                Completion((number, turn, 80_000 + 10 * number + turn), TOKENIZER, "m", TENANT), None, None
            )
            memory.read(store, TENANT, TOKENIZER)
            memory.seal()
            if turn % 3 == 2:
                with contextlib.suppress(CacheError):  # another one reads: the bytes in SQLite's log go later
                    store.forget(Selection(ids=(key,)))
                forgotten.append(key)
        store.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    store = SQLiteStore.open(tmp_path)
    memory = memory_of(store)
    assert len(tokens_of(memory)) == 1 + 24 - 8
    memory.seal()
    in_segments = [
        key for sealed in files_of(store).listed() for key in files_of(store).completions(sealed)["id"].tolist()
    ]
    assert sorted(in_segments) == sorted(tokens_of(memory))
    assert not set(in_segments) & set(forgotten)
    store.close()


def test_a_process_killed_while_sealing_loses_nothing(tmp_path):
    """Its segment's files are there, but no manifest lists them: they count for nothing, and opening erases them."""
    code = """
        import os, signal, sys
        from precedent.cache import Completion, SQLiteStore
        from precedent.cache.segments import SegmentFiles
        from precedent.drafters.recall.tenant_memory import TenantMemory
        store = SQLiteStore.open(sys.argv[1])
        for number in range(30):
            store.insert(Completion((5, 6, number), "tok", "model", "shop"), None, None)
        SegmentFiles.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        memory = TenantMemory(store.partition("shop", "tok"))
        memory.read(store, "shop", "tok")
        memory.seal()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.tokens.npy"))) == 1
    store = SQLiteStore.open(tmp_path)
    assert list(tmp_path.rglob("*.npy")) == []
    memory = memory_of(store)
    assert tokens_of(memory) == {number + 1: (5, 6, number) for number in range(30)}
    assert memory.seal()  # the dead process's lock went with it
    assert len(files_of(store).listed()) == 1
    store.close()
