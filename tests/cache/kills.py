"""Processes that are killed while they use a cache, and disks that run full: nothing acknowledged is lost.

    python tests/cache/kills.py FOLDER NAME,NAME,… NUMBER SEED

Each process says line by line what it is going to do and what it has done. It is killed as soon as the files have
changed as its aim says (while SQLite folds its log in, rewrites the file, and so on), or at any moment; with
`file-limit` the system ends it at exactly one write. Then the cache must open, be sound, and hold what was
acknowledged. `full-disks` fills small file systems in memory, and needs a namespace of its own: `unshare --user
--map-root-user --mount`. Prints counts as JSON, a line for each name; an assertion that fails ends it with a traceback.
Run by `test_cache_damage.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import numpy as np

from precedent.cache import Bounds, Completion, Selection, SQLiteStore, verify_cache
from precedent.cache.index import SimilarityIndex
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, unit_vector

Say = Callable[..., None]

PATIENCE = 300.0
"""Seconds until a process that does nothing is a failure; nothing else depends on time."""

TENANTS = ("a", "b")


FORK = multiprocessing.get_context("fork")


class Child:
    """Runs `work(say)` in a forked process; what it raises is said as `failed`."""

    def __init__(self, work: Callable[[Say], object]) -> None:
        self._hear, speak = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._run, args=(work, speak))
        self.process.start()
        speak.close()

    @staticmethod
    def _run(work: Callable[[Say], object], speak: Connection) -> None:
        try:
            work(lambda *words: speak.send(words))
        except BaseException:
            speak.send(("failed", traceback.format_exc()))

    def heard(self) -> Iterator[tuple]:
        """What it says, until it has ended; what a kill cut short is left out."""
        with contextlib.suppress(EOFError, OSError):
            while words := self._hear.recv():
                assert words[0] != "failed", words[1]
                yield words

    def wait(self) -> int:
        """Its exit status, negative for a signal."""
        self.process.join()
        return self.process.exitcode


def record(key: str, tenant: str = "a") -> Completion:
    """The completion that belongs to a key; a large one covers some ten pages."""
    tokens = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=48).digest(), "<u2").tolist()
    times = 36_000 if key.startswith("large") else 60
    return Completion(tuple(tokens), "tok", "model", tenant, f"query {key}", text=f"{key} " * times)


def stored(store: SQLiteStore, key: str, tenant: str = "a") -> int:
    return store.insert(record(key, tenant), unit_vector(len(key)), EMBEDDER)


def main_file(folder: Path) -> Path:
    return folder / "precedent.sqlite"


class Expected:
    """What must be in a cache, and what may be, by what its processes said."""

    def __init__(self, inserted: dict[int, tuple[str, str]] | None = None) -> None:
        self.inserted, self.acknowledged = dict(inserted or {}), 0
        self.forgetting, self.forgot = set[int](), set[int]()
        self.crediting, self.credited = Counter[int](), Counter[int]()

    def take(self, word: str, row_id: int = 0, *values: str) -> None:
        if word == "inserted":
            self.inserted[row_id] = values
        elif word in ("crediting", "credited"):
            getattr(self, word)[row_id] += 1
        elif word in ("forgetting", "forgot"):
            getattr(self, word).add(row_id)
        self.acknowledged += word in ("inserted", "credited", "forgot")

    def check(self, folder: Path) -> None:
        """The cache is sound, holds all that was acknowledged and nothing forgotten, and goes on."""
        assert verify_cache(folder).findings == ()
        store = SQLiteStore.open(folder)
        found = {one.id: one for one in store.list(Selection(), None)}
        for row_id, (key, tenant) in self.inserted.items():
            if row_id in found:
                wanted, one = record(key, tenant), found[row_id]
                assert (one.token_ids, one.text, one.tenant) == (wanted.token_ids, wanted.text, tenant)
            else:
                assert row_id in self.forgetting, f"record {row_id} is lost"
        assert not self.forgot & set(found), "a forgotten record is back"
        for row_id in self.crediting.keys() & found.keys():
            one = found[row_id]
            assert self.credited[row_id] <= one.accepted <= self.crediting[row_id]
            assert one.rejected == 2 * one.accepted
        vectors = {row_id for tenant in TENANTS for row_id in store.vectors_since(tenant, "tok", 0)[0].tolist()}
        assert vectors == set(found)
        last = max(found, default=0)
        assert stored(store, f"after {last}") > last
        store.close()
        left = list(folder.glob(".precedent-*"))
        assert len(left) <= 1, "an unfinished file of the dead process; a young one might be a living process's"
        for path in left:
            os.utime(path, (0, 0))
        SQLiteStore.open(folder).close()
        assert list(folder.glob(".precedent-*")) == [], "what was half-made is swept up"


def unreadable_without_its_log(file: Path) -> bool:
    """Whether the kill hit a checkpoint: the file alone is no database."""
    if not file.exists():
        return False
    connection = sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)
    try:
        return connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",)
    except sqlite3.DatabaseError:
        return True
    finally:
        connection.close()


# Killed while something happens


def size_and_time(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def names_in(folder: Path) -> list[str]:
    """All files below, whatever comes and goes meanwhile."""
    return sorted(str(Path(where, name)) for where, _, names in os.walk(folder) for name in names)


class Checkpoint:
    """The main file changes only when SQLite folds its log in; `changes` says at the how manieth change it may die."""

    base_records: ClassVar[int] = 3
    changes: ClassVar = (1, 3)

    def prepare(self, folder: Path) -> dict[int, tuple[str, str]]:
        """A closed cache and what is in it."""
        store = SQLiteStore.open(folder)
        store._database._writer.execute("PRAGMA synchronous=OFF")
        keys = [f"large base {number}" for number in range(self.base_records)]
        held = {stored(store, key): (key, "a") for key in keys}
        store.close()
        return held

    def work(self, folder: Path, say: Say) -> None:
        """Until killed."""
        store = SQLiteStore.open(folder)
        say("ready")
        for number in range(10**9):
            self.step(store, number, say)

    def step(self, store: SQLiteStore, number: int, say: Say) -> int:
        row_id = stored(store, key := f"large {number}")
        say("inserted", row_id, key, "a")
        return row_id

    def seen(self, folder: Path) -> object:
        """What changes when the process is where it shall die."""
        return size_and_time(main_file(folder))

    def check(self, folder: Path, expected: Expected) -> None:
        expected.check(folder)


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


class Vacuum(Checkpoint):
    """Forgetting deletes, rewrites the whole file through the log, folds that in and cuts the file."""

    base_records = 12
    changes = (1, 12)

    def step(self, store: SQLiteStore, number: int, say: Say) -> int:
        super().step(store, number, say)
        victim = store.list(Selection(), None)[-1].id
        say("forgetting", victim)
        store.forget(Selection(ids=(victim,)))
        say("forgot", victim)
        return victim

    def seen(self, folder: Path) -> object:
        return size_and_time(main_file(folder)), size_and_time(folder / "precedent.sqlite-wal")[0]


class Eviction(Checkpoint):
    """A full cache: each transaction that inserts may delete many. What has saved the most stays."""

    base_records = 0
    changes = (1, 60)
    bounds = Bounds(max_records=60)

    def work(self, folder: Path, say: Say) -> None:
        store = SQLiteStore.open(folder, bounds=self.bounds)
        say("ready")
        for number in range(10**9):
            row_id = stored(store, key := f"small {number}")
            if number % 40 == 0 and number < 800:
                store.credit({row_id: (10**9, 0)})
                say("inserted", row_id, key, "a")

    def seen(self, folder: Path) -> object:
        return size_and_time(folder / "precedent.sqlite-wal"), size_and_time(main_file(folder))

    def check(self, folder: Path, expected: Expected) -> None:
        super().check(folder, expected)
        store = SQLiteStore.open(folder, bounds=self.bounds)
        stats = store.stats()
        assert sum(share.records for share in stats.tenants) == stats.records <= self.bounds.max_records + 1
        store.close()


class Creation(Checkpoint):
    """A new cache in a folder that is new each time, then one record in it."""

    changes = (1, 8)

    def prepare(self, folder: Path) -> dict[int, tuple[str, str]]:
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

    def check(self, folder: Path, expected: Expected) -> None:
        SQLiteStore.open(folder / "new").close()
        super().check(folder / "new", expected)


class SetAside(Checkpoint):
    """A damaged file is set aside: whenever that is cut short, the next opening finishes it, and no file is lost.

    On a busy machine it may be done, and the process have ended, before the kill.
    """

    base_records = 12
    changes = (1, 8)

    def work(self, folder: Path, say: Say) -> None:
        with contextlib.closing(sqlite3.connect(main_file(folder), isolation_level=None)) as changed:
            changed.execute("DELETE FROM meta WHERE key = 'epoch'")
        say("ready")
        SQLiteStore.open(folder)

    def seen(self, folder: Path) -> object:
        return names_in(folder)

    def check(self, folder: Path, expected: Expected) -> None:
        SQLiteStore.open(folder).close()
        super().check(folder, Expected())
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


def killed(aim: Checkpoint, folder: Path, choose: random.Random) -> Iterator[list]:
    """Let a process work until what is seen of it has changed so often, kill it; gives all that it has said."""
    child = Child(lambda say: aim.work(folder, say))
    said = child.heard()
    next(said)
    wanted, before, give_up = choose.randint(*aim.changes), aim.seen(folder), time.monotonic() + PATIENCE
    try:
        while wanted and child.process.is_alive():
            assert time.monotonic() < give_up, "nothing happened"
            now = aim.seen(folder)
            if now != before:
                before, wanted = now, wanted - 1
        for _ in range(choose.choice((0, 0, 0, 30, 300, 3000))):
            choose.random()
    finally:
        child.process.kill()
        child.wait()
    yield from said


def aimed(name: str, folder: Path, kills: int, choose: random.Random) -> dict[str, int]:
    aim, torn, acknowledged = AIMS[name](), 0, 0
    held = aim.prepare(folder / "base")
    for number in range(kills):
        cache, expected = folder / str(number), Expected(held)
        shutil.copytree(folder / "base", cache)
        for words in killed(aim, cache, choose):
            expected.take(*words)
        acknowledged += expected.acknowledged
        torn += unreadable_without_its_log(main_file(cache))
        aim.check(cache, expected)
        shutil.rmtree(cache)
    return {"kills": kills, "torn": torn, "acknowledged": acknowledged}


# Killed at any moment, four processes on one cache

PROCESSES, ROUNDS_PER_CACHE = 4, 25


def any_work(folder: Path, name: str, say: Say) -> None:
    """Insert, credit, read, recall and forget by chance, until killed."""
    choose, store, mine = random.Random(name), SQLiteStore.open(folder), list[int]()
    index = SimilarityIndex(store)
    for number in range(10**9):
        tenant, key = choose.choice(TENANTS), f"{name} {number}"
        action = choose.choices(("insert", "credit", "read", "recall", "forget"), (40, 20, 20, 18, 2))[0]
        if action == "insert":
            mine.append(stored(store, key, tenant))
            say("inserted", mine[-1], key, tenant)
        elif action == "read":
            for one in store.since(tenant, "tok", 0):
                assert record(one.query.removeprefix("query "), tenant).token_ids == one.token_ids
        elif action == "recall":
            assert len(index.search(unit_vector(3), tenant, "tok", 5)) <= 5
        elif mine and action == "credit":
            say("crediting", row_id := choose.choice(mine))
            store.credit({row_id: (1, 2)})
            say("credited", row_id)
        elif mine:
            say("forgetting", row_id := mine.pop(choose.randrange(len(mine))))
            try:
                store.forget(Selection(ids=(row_id,)))
            except CacheError as error:
                if "run forget again" not in str(error):  # others hold the file: the record is gone all the same
                    raise
            say("forgot", row_id)


def at_any_moment(folder: Path, kills: int, choose: random.Random) -> dict[str, int]:
    expected, acknowledged, rounds = Expected(), 0, -(-kills // PROCESSES)
    for number in range(rounds):
        if number % ROUNDS_PER_CACHE == 0:
            expected, cache = Expected(), folder / str(number)
            SQLiteStore.open(cache).close()
        children = [Child(partial(any_work, cache, f"{choose.random()} {name}")) for name in range(PROCESSES)]
        choose.shuffle(children)
        for child in children:
            time.sleep(choose.uniform(0.01, 0.25))
            child.process.kill()
        before = expected.acknowledged
        for child in children:
            child.wait()
            for words in child.heard():
                expected.take(*words)
        acknowledged += expected.acknowledged - before
        expected.check(cache)
    return {"kills": rounds * PROCESSES, "acknowledged": acknowledged}


# Disks that run full


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def store_until_full(cache: Path, choose: random.Random, kill: bool, say: Say) -> None:
    store = SQLiteStore.open(cache)
    for number in range(10**6):
        key = f"{'large' if choose.random() < 0.7 else 'small'} {number}"
        row_id = stored(store, key)
        if row_id == 0:
            break
        say("inserted", row_id, key, "a")
    if choose.random() < 0.5:
        store.close()
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)


def take_all_space(disk: Path) -> None:
    """Also what SQLite's index of the log has had, as after a restart of the machine that lost it."""
    (disk / "cache" / "precedent.sqlite-shm").unlink(missing_ok=True)
    with (disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(512))


def opens_while_full(cache: Path, expected: Expected) -> bool:
    """Whether the cache could be opened on a full disk; if so it serves everything."""
    try:
        store = SQLiteStore.open(cache)
    except CacheError as error:
        if "disk space" not in str(error):
            raise
        return False
    assert expected.inserted.keys() <= {one.id for one in store.list(Selection(), None)}
    store.close()
    return True


def full_disks(folder: Path, disks: int, choose: random.Random) -> dict[str, int]:
    counts = Counter(disks=disks)
    for number in range(disks):
        disk, size = folder / str(number), 4096 * choose.randint(1100, 3500)
        cache, expected = disk / "cache", Expected()
        disk.mkdir()
        mount(disk, f"size={size}")
        child = Child(partial(store_until_full, cache, choose, number % 2 == 1))
        for words in child.heard():
            expected.take(*words)
        child.wait()
        counts["torn"] += unreadable_without_its_log(main_file(cache))
        if number % 4 > 1:
            take_all_space(disk)
        counts["opened full"] += opens_while_full(cache, expected)
        mount(disk, f"remount,size={2 * size}")
        expected.check(cache)
        counts["acknowledged"] += expected.acknowledged
        subprocess.run(["umount", str(disk)], check=True)
    return dict(counts)


def main(folder: Path, names: str, number: int, seed: int) -> None:
    ways = {"at-any-moment": at_any_moment, "full-disks": full_disks}
    for name in names.split(","):
        place, choose = folder / name, random.Random(seed)
        place.mkdir()
        counts = ways[name](place, number, choose) if name in ways else aimed(name, place, number, choose)
        print(json.dumps({"name": name, **counts}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
