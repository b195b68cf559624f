"""What killed processes leave is swept up; what living ones are making is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

from helpers.cache_files import filled, tokens_in

from precedent.cache import Selection, SQLiteStore
from precedent.cache.snapshot.sealing import IndexFolder
from precedent.cache.store import database, files
from precedent.cache.store.connection import connect
from precedent.cache.store.files import half_made
from precedent.testing.store_contract import completion


def test_what_a_killed_creation_left_is_swept_up(tmp_path):
    dead = tmp_path / ".precedent-12345678.new"
    dead.mkdir()
    (dead / "precedent.sqlite").write_bytes(b"half")
    (tmp_path / ".precedent-notes").write_text("mine")
    SQLiteStore.open(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"precedent.sqlite", ".precedent-notes"}


def test_a_living_creation_is_left_alone(tmp_path):
    """In this process and in another one."""
    code = """
        import sys
        from pathlib import Path
        from precedent.cache.store.files import half_made
        with half_made(Path(sys.argv[1])) as new:
            print(new.parent.name, flush=True)
            sys.stdin.read()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = tmp_path / other.stdout.readline().strip()
        with half_made(tmp_path) as mine:
            SQLiteStore.open(tmp_path).close()
            assert mine.exists()
            assert theirs.is_dir()
        other.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["precedent.sqlite"]


def test_a_creation_that_is_swept_up_before_it_is_locked_begins_again(tmp_path, monkeypatch):
    locked, swept = files.locked, []

    def late(path, *, wait):
        if not swept:
            swept.append(path)
            path.rmdir()
        return locked(path, wait=wait) if path.exists() else None

    monkeypatch.setattr(files, "locked", late)
    SQLiteStore.open(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["precedent.sqlite"]
    assert len(swept) == 1


def test_files_of_a_seal_in_progress_are_not_swept_up(tmp_path):
    """Opening meanwhile leaves them; when the process that seals is dead, opening erases them."""
    index, sealing, end = IndexFolder(filled(tmp_path)), threading.Event(), threading.Event()
    folder = index.path / ("a" * 32)

    def seal() -> None:
        with index.alone() as alone:
            assert alone
            folder.mkdir()
            (folder / ".abcdefgh.new").write_bytes(b"tokens")
            (folder / "0123456789abcdef.tokens.npy").write_bytes(b"tokens")
            sealing.set()
            end.wait()

    thread = threading.Thread(target=seal)
    thread.start()
    sealing.wait()
    SQLiteStore.open(tmp_path).close()
    assert len(list(folder.iterdir())) == 2
    end.set()
    thread.join()
    (index.path / "writing").touch()  # as a killed process leaves it
    SQLiteStore.open(tmp_path).close()
    assert not folder.exists()
    assert not (index.path / "writing").exists()


def test_opening_a_file_that_has_just_been_set_aside_opens_the_new_one(tmp_path, monkeypatch):
    """Between finding the file and reading from it: what is written to the old one would go into the new one's log."""
    file, other = filled(tmp_path / "a"), filled(tmp_path / "b", range(5))
    connections = []

    def swapped(path, mode="mode=rw"):
        connections.append(connect(path, mode))
        if len(connections) == 1:
            path.rename(f"{path}.damaged")
            other.rename(path)
        return connections[-1]

    monkeypatch.setattr(database, "connect", swapped)
    store = SQLiteStore.open(file)
    assert len(store.list(Selection(), None)) == 5
    store.insert(completion(77), None, None)
    store.close()
    assert tokens_in(file) == [0, 1, 2, 3, 4, 77]
