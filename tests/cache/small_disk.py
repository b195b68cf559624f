"""A cache on a disk that runs full, over and over: a small file system in memory, in a namespace of this process's own.

    unshare --user --map-root-user --mount python tests/cache/small_disk.py FOLDER DISKS SEED

Each disk is filled by a process that stores records until nothing more is stored; some of these processes are killed
then. The cache is looked at while the disk is full, and again when there is room. Prints counts as JSON; an assertion
that fails ends it with a traceback. Run by `test_cache_damage.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from aimed_kills import unreadable_without_its_log
from aims import TENANT, assert_holds, large, main_file
from crashing_store import record
from speaking import Child, Say

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, unit_vector

KIB = 1024


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


class Disk:
    """Room for a cache, and for a file that takes part of it."""

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self.folder, self._choose = folder, choose
        self._size = 4 * KIB * choose.randint(1100, 3500)
        folder.mkdir()
        mount(folder, f"size={self._size}")
        self.cache = folder / "cache"

    def fill_up(self, kill: bool) -> dict[int, str]:
        """Store until the disk is full; what was acknowledged."""

        def work(say: Say) -> None:
            store_until_full(self.cache, self._choose, say)
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)

        child = Child(work)
        found = list(child.heard())
        child.wait()
        child.close()
        return {row_id: key for key, row_id in found}

    def take_all_space(self) -> None:
        """Also what SQLite's index of the log has had, as after a restart of the machine that lost it."""
        (self.cache / "precedent.sqlite-shm").unlink(missing_ok=True)
        with (self.folder / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(bytes(512))

    def give_space(self) -> None:
        mount(self.folder, f"remount,size={2 * self._size}")

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)
        self.folder.rmdir()


def store_until_full(cache: Path, choose: random.Random, say: Say) -> None:
    store = SQLiteStore.open(cache)
    for key in keys(choose):
        new = large(key) if key.startswith("large") else record(key, TENANT)
        row_id = store.insert(new, unit_vector(len(key)), EMBEDDER)
        if row_id == 0:
            break
        say(key, row_id)
    if choose.random() < 0.5:
        store.close()


def keys(choose: random.Random) -> Iterator[str]:
    for number in range(10**6):
        yield f"{'large' if choose.random() < 0.7 else 'small'} {number}"


def look_while_full(cache: Path, held: dict[int, str]) -> bool:
    """Whether the cache could be opened on a full disk; if so it serves everything."""
    try:
        store = SQLiteStore.open(cache)
    except CacheError as error:
        if "disk space" not in str(error):
            raise
        return False
    found = {one.id for one in store.list(Selection(tenant=TENANT), None)}
    assert held.keys() <= found
    store.close()
    return True


def main(folder: Path, disks: int, seed: int) -> None:
    choose, counts = random.Random(seed), {"disks": disks, "refused": 0, "acknowledged": 0, "torn": 0, "opened full": 0}
    for number in range(disks):
        disk = Disk(folder / str(number), choose)
        held = disk.fill_up(kill=number % 2 == 1)
        counts["acknowledged"] += len(held)
        counts["torn"] += unreadable_without_its_log(main_file(disk.cache))
        if number % 4 > 1:
            disk.take_all_space()
        counts["opened full"] += look_while_full(disk.cache, held)
        disk.give_space()
        report = verify_cache(disk.cache)
        assert report.findings == (), report.findings
        assert_holds(disk.cache, held, set())
        disk.close()
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
