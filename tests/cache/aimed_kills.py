"""Processes that are killed at the worst moments: while SQLite folds its log in, rewrites the file, and so on.

    python tests/cache/aimed_kills.py FOLDER AIM,AIM,… KILLS SEED

The parent watches the files and kills as soon as they change as the aim says (`aims.py`); where a limit on the size of
files ends the process instead, it dies at exactly that write. Then the cache must open, be sound, and hold what was
acknowledged. Prints counts as JSON, a line for each aim; an assertion that fails ends it with a traceback. Run by
`test_cache_damage.py`.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from aims import AIMS, PATIENCE, Aim, main_file
from speaking import Child

from precedent.errors import CacheError


def killed(aim: Aim, folder: Path, choose: random.Random) -> Iterator[list]:
    """Let a process work until what is seen of it has changed so often, kill it; gives all that it has said."""
    child = Child(lambda say: aim.work(folder, say))
    said = child.heard()
    ready = next(said, ["nothing"])
    try:
        wait_for_changes(aim, folder, child, choose.randint(*aim.changes))
        for _ in range(choose.choice((0, 0, 0, 30, 300, 3000))):
            choose.random()
    finally:
        child.kill()
        child.wait()
    yield from (ready, *said)
    child.close()


def wait_for_changes(aim: Aim, folder: Path, child: Child, wanted: int) -> None:
    """Until that many were seen, or the process is dead."""
    before, give_up = aim.seen(folder), time.monotonic() + PATIENCE
    while wanted and not child.has_ended():
        assert time.monotonic() < give_up, "nothing happened"
        now = aim.seen(folder)
        if now != before:
            before, wanted = now, wanted - 1


def unreadable_without_its_log(file: Path) -> bool:
    """Whether the kill hit a checkpoint: the file alone is no database."""
    connection = sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)
    try:
        return connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",)
    except sqlite3.DatabaseError:
        return True
    finally:
        connection.close()


def run(folder: Path, name: str, kills: int, seed: int) -> dict[str, object]:
    """Kill so often with this aim; returns counts."""
    folder.mkdir()
    aim, choose, torn, acknowledged = AIMS[name](), random.Random(seed), 0, 0
    held = aim.prepare(folder / "base")
    for number in range(kills):
        cache = folder / str(number)
        shutil.copytree(folder / "base", cache)
        now, gone = dict(held), set[int]()
        for word, *values in killed(aim, cache, choose):
            if word == "inserted":
                now[values[0]] = values[1]
                acknowledged += 1
            elif word == "forgetting":
                gone.add(values[0])
        torn += main_file(cache).exists() and unreadable_without_its_log(main_file(cache))
        try:
            aim.check(cache, now, gone)
        except (CacheError, AssertionError) as error:
            raise AssertionError(f"kill {number}: {error}") from error
        shutil.rmtree(cache)
    return {"aim": name, "kills": kills, "refused": 0, "torn": torn, "acknowledged": acknowledged}


if __name__ == "__main__":
    for each in sys.argv[2].split(","):
        print(json.dumps(run(Path(sys.argv[1], each), each, int(sys.argv[3]), int(sys.argv[4]))), flush=True)
