"""The worst moments to be killed at: what a process does then, what of it is seen, and what must hold after."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
from pathlib import Path
from typing import ClassVar

from crashing_store import record
from speaking import Say

from precedent.cache import Bounds, Completion, Selection, SQLiteStore, verify_cache
from precedent_testing.store_contract import EMBEDDER, unit_vector

PATIENCE = 300.0
"""Seconds until a process that does nothing is a failure; nothing else depends on time."""

TENANT = "a"
LONG = 600
"""Repetitions of a key in the text of a large record: some 10 pages each."""


def large(key: str) -> Completion:
    one = record(key, TENANT)
    return Completion(one.token_ids, one.tokenizer, one.model, one.tenant, one.query, text=f"{key} " * 60 * LONG)


def stored(store: SQLiteStore, key: str) -> int:
    return store.insert(large(key) if key.startswith("large") else record(key, TENANT), unit_vector(len(key)), EMBEDDER)


def main_file(folder: Path) -> Path:
    return folder / "precedent.sqlite"


def size_and_time(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def names_in(folder: Path) -> list[str]:
    """All files below, whatever comes and goes meanwhile."""
    return sorted(str(Path(where, name)) for where, _, names in os.walk(folder) for name in names)


class Aim:
    """What the process does, and what of it the parent sees; `changes` says at the how manieth change it may die."""

    changes: ClassVar = (1, 1)
    base_records: ClassVar[int] = 0

    def prepare(self, folder: Path) -> dict[int, str]:
        """A closed cache and what is in it."""
        store = SQLiteStore.open(folder)
        store._database._writer.execute("PRAGMA synchronous=OFF")
        held = {stored(store, key): key for key in (f"large base {n}" for n in range(self.base_records))}
        store.close()
        return held

    def work(self, folder: Path, say: Say) -> None:
        """Until killed."""
        raise NotImplementedError

    def seen(self, folder: Path) -> object:
        """What changes when the process is where it shall die."""
        return size_and_time(main_file(folder))

    def check(self, folder: Path, held: dict[int, str], gone: set[int]) -> None:
        """The cache opens, is sound, and holds what was acknowledged."""
        report = verify_cache(folder)
        assert report.findings == (), report.findings
        assert_holds(folder, held, gone)


def assert_holds(folder: Path, held: dict[int, str], gone: set[int]) -> None:
    store = SQLiteStore.open(folder)
    found = {one.id: one for one in store.list(Selection(tenant=TENANT), None)}
    for row_id, key in held.items():
        assert row_id in found or row_id in gone, f"record {row_id} is lost"
        if row_id in found:
            wanted = large(key) if key.startswith("large") else record(key, TENANT)
            assert (found[row_id].token_ids, found[row_id].text) == (wanted.token_ids, wanted.text)
    vectors = store.vectors_since(TENANT, "tok", 0)[0].tolist()
    assert sorted(found) == vectors
    assert store.insert(record("once more", TENANT), unit_vector(1), EMBEDDER) > max(found, default=0)
    store.close()
    assert_swept(folder)


def assert_swept(folder: Path) -> None:
    """The dead process left one unfinished file at most; a young one might be a living process's, an old one goes."""
    left = list(folder.glob(".precedent-*"))
    assert len(left) <= 1, left
    for path in left:
        os.utime(path, (0, 0))
    SQLiteStore.open(folder).close()
    assert list(folder.glob(".precedent-*")) == [], "what was half-made is swept up"


class Checkpoint(Aim):
    """The main file changes only when SQLite folds its log in."""

    base_records = 3
    changes = (1, 3)

    def work(self, folder: Path, say: Say) -> None:
        store = SQLiteStore.open(folder)
        say("ready")
        for number in range(10**9):
            key = f"large {number}"
            say("inserted", stored(store, key), key)


class FileLimit(Checkpoint):
    """The system kills the process at the write that makes the main file longer than it may be."""

    base_records = 40

    def __init__(self) -> None:
        self._choose = random.Random(1)

    def work(self, folder: Path, say: Say) -> None:
        most = main_file(folder).stat().st_size + 4096 * self._choose.randrange(300) + self._choose.choice((0, 1, 2048))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        super().work(folder, say)

    def seen(self, folder: Path) -> object:
        self._choose.random()  # in the parent: the next child has another limit
        return None


class Vacuum(Aim):
    """Forgetting deletes, rewrites the whole file through the log, folds that in and cuts the file."""

    base_records = 12
    changes = (1, 12)

    def work(self, folder: Path, say: Say) -> None:
        store = SQLiteStore.open(folder)
        say("ready")
        for number in range(10**9):
            key = f"large {number}"
            row_id = stored(store, key)
            say("inserted", row_id, key)
            victim = store.list(Selection(tenant=TENANT), None)[-1].id
            say("forgetting", victim)
            store.forget(Selection(ids=(victim,)))
            say("forgot", victim)

    def seen(self, folder: Path) -> object:
        return size_and_time(main_file(folder)), size_and_time(folder / "precedent.sqlite-wal")[0]


class Eviction(Aim):
    """A full cache: each transaction that inserts may delete many. What has saved the most stays."""

    changes = (1, 60)
    bounds = Bounds(max_records=60)

    def work(self, folder: Path, say: Say) -> None:
        store = SQLiteStore.open(folder, bounds=self.bounds)
        say("ready")
        for number in range(10**9):
            key = f"small {number}"
            row_id = stored(store, key)
            if number % 40 == 0 and number < 800:
                store.credit({row_id: (10**9, 0)})
                say("inserted", row_id, key)

    def seen(self, folder: Path) -> object:
        return size_and_time(folder / "precedent.sqlite-wal"), size_and_time(main_file(folder))

    def check(self, folder: Path, held: dict[int, str], gone: set[int]) -> None:
        super().check(folder, held, gone)
        store = SQLiteStore.open(folder, bounds=self.bounds)
        stats = store.stats()
        assert sum(share.records for share in stats.tenants) == stats.records <= self.bounds.max_records + 1
        store.close()


class Creation(Aim):
    """A new cache in a folder that is new each time, then one record in it."""

    changes = (1, 8)

    def prepare(self, folder: Path) -> dict[int, str]:
        folder.mkdir()
        return {}

    def work(self, folder: Path, say: Say) -> None:
        say("ready")
        for number in range(10**9):
            shutil.rmtree(folder / "new", ignore_errors=True)
            store = SQLiteStore.open(folder / "new")
            stored(store, f"small {number}")
            store.close()

    def seen(self, folder: Path) -> object:
        return names_in(folder / "new")

    def check(self, folder: Path, held: dict[int, str], gone: set[int]) -> None:
        SQLiteStore.open(folder / "new").close()
        super().check(folder / "new", held, gone)


class SetAside(Aim):
    """A damaged file is set aside: whenever that is cut short, the next opening finishes it, and no file is lost.

    On a busy machine it may be done, and the process have ended, before the kill.
    """

    base_records = 12
    changes = (1, 8)

    def work(self, folder: Path, say: Say) -> None:
        changed = sqlite3.connect(main_file(folder), isolation_level=None)
        changed.execute("DELETE FROM meta WHERE key = 'epoch'")
        changed.close()
        say("ready")
        SQLiteStore.open(folder)

    def seen(self, folder: Path) -> object:
        return names_in(folder)

    def check(self, folder: Path, held: dict[int, str], gone: set[int]) -> None:
        SQLiteStore.open(folder).close()
        super().check(folder, {}, gone)
        (kept,) = [path for path in folder.iterdir() if path.name.endswith(".damaged")]
        assert sqlite3.connect(kept).execute("SELECT count(*) FROM completion").fetchone() == (self.base_records,)


AIMS = {
    "checkpoint": Checkpoint,
    "file-limit": FileLimit,
    "vacuum": Vacuum,
    "eviction": Eviction,
    "creation": Creation,
    "set-aside": SetAside,
}
