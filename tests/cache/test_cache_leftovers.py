"""What killed processes leave is swept up; what living ones are making is left alone."""

from __future__ import annotations

import os
import threading

from helpers.cache_files import filled, tokens_in

from precedent.cache import Selection, SQLiteStore, database
from precedent.cache.database import connect
from precedent_testing.store_contract import completion


def test_what_a_killed_creation_left_is_swept_up(tmp_path):
    """Once it is old: another process may be making a young one. Other files stay."""
    old, young = tmp_path / ".precedent-12345678.new", tmp_path / ".precedent-abcdefgh.new"
    for left in (old, young, tmp_path / ".precedent-notes", tmp_path / ".12345678.new"):
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
    os.utime(young)
    SQLiteStore.open(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("precedent.sqlite", young.name),
        *(".precedent-notes", ".12345678.new"),
    }


def test_many_threads_create_one_file(tmp_path):
    """All of them insert into the file that the first one made."""

    def insert(number: int) -> None:
        store = SQLiteStore.open(tmp_path)
        store.insert(completion(number), None, None)
        store.close()

    threads = [threading.Thread(target=insert, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens_in(tmp_path / "precedent.sqlite") == list(range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["precedent.sqlite"]


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
