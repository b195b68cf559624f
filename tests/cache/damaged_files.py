"""Damaged and hostile cache files, each verified, opened, read and written to.

    python tests/cache/damaged_files.py FOLDER FILES SEED

A process of its own takes a few hundred of them, so that a crash or a hang is seen. Whatever is done to a file: only
errors of Precedent's own are raised, a file that is refused stays as it was, one that is set aside too, nothing is
served that was not stored, and an id is returned for what is stored alone. Prints counts as JSON; whatever fails ends
it with a traceback. Run by `test_cache_damage.py`.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from file_damage import Damage
from sound_files import BASE, NEW, STORED, TENANTS, Content, bases, content_of, record, write
from speaking import Child, Say

from precedent.cache import Completion, Selection, SQLiteStore, verify_cache
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER

AT_ONCE = 250
PATIENCE = 120
"""Seconds for one file, after which it counts as a hang."""


def as_new(one: Completion) -> Completion:
    return replace(one, id=0, created=0.0, count=1, hits=0, accepted=0, rejected=0)


def one_line(error: CacheError) -> None:
    assert "\n" not in str(error), error


def opened(cache: Path) -> SQLiteStore | None:
    """None where it is refused; then file, log and journal are as they were."""
    before = content_of(cache)
    try:
        return SQLiteStore.open(cache)
    except CacheError as error:
        one_line(error)
    assert content_of(cache) == before, "refused and changed"
    return None


def read(store: SQLiteStore) -> int:
    """Everything a drafter and a person would read: how many records are served, all of them as they were stored."""
    served = 0
    for tenant in TENANTS:
        for one in (found := store.since(tenant, "tok", 0)):
            assert as_new(one) in STORED, f"served what was never stored: {one}"
            assert one.tenant == tenant, "a record of another tenant"
        served += len(found)
        store.ids(tenant, "tok")
        ids, vectors = store.vectors_since(tenant, "tok", 0)
        assert len(ids) == len(vectors)
    listed = store.list(Selection(), None)
    assert all(as_new(one) in STORED for one in listed)
    store.list(Selection(containing="text 7"), 10)
    store.records(Selection(), 0, 10**6)
    store.stats()
    store.epoch()
    return served


def use(store: SQLiteStore, choose: random.Random) -> int:
    """Store, credit, forget; the id of what was stored."""
    new = record(choose.choice((*BASE, *NEW, *range(300, 400))))
    embedder = store.embedder() or EMBEDDER  # damage to its record may have made it another one
    vector = np.resize(np.eye(1, 8, dtype=np.float32)[0], embedder.dimension) if embedder.dimension <= 8 else None
    row_id = store.insert(new, vector, embedder)
    if row_id:
        found = store.list(Selection(ids=(row_id,)), None)
        assert [as_new(one) for one in found] == [new], "an id of what is not stored"
    store.credit({row_id: (3, 1), 5: (1, 0)})
    store.forget(Selection(ids=(7,)))
    assert store.list(Selection(ids=(7,)), None) == []
    return row_id


def tried(what: Callable[[], object]) -> bool:
    try:
        what()
    except CacheError as error:
        one_line(error)
        return False
    return True


def case(cache: Path, content: Content, choose: random.Random) -> str:
    """Everything that is done with one file; returns what became of it."""
    write(cache, content)
    before = content_of(cache)
    outcome = "refused"
    tried(lambda: verify_cache(cache))
    assert content_of(cache) == before, "verified and changed"
    store = opened(cache)
    if store is not None:
        kept = cache / "precedent.sqlite.damaged"
        whole = tried(lambda: read(store))
        whole &= tried(lambda: use(store, choose))
        whole &= tried(lambda: read(store))
        store.close()
        outcome = "served" if whole else "served in part"
        if kept.exists():
            outcome = "set aside"
            assert whole, "a new cache serves and stores"
            assert verify_cache(cache).sound
            assert kept.read_bytes() == before.get("", b""), "the damaged file is kept as it was"
            assert "-wal" not in before or Path(f"{kept}-wal").read_bytes() == before["-wal"]
    assert not [path for path in cache.iterdir() if path.name.startswith(".")], "nothing is left half-made"
    return outcome


def take(folder: Path, numbers: range, seed: int, say: Say) -> None:
    """One file after the other; says which one begins and what became of it."""
    known = bases(folder)
    for number in numbers:
        choose = random.Random(seed * 10**7 + number)
        what, content = Damage(choose, known, folder).content()
        say("begins", number, what)
        signal.alarm(PATIENCE)
        say("ended", number, case(folder / str(number), content, choose))
        shutil.rmtree(folder / str(number))


def run(folder: Path, numbers: range, seed: int) -> Counter[str]:
    """A process that takes these files: what became of each; an assertion fails where it crashed, hung or raised."""
    folder.mkdir()
    child, outcomes, last = Child(lambda say: take(folder, numbers, seed, say)), Counter[str](), None
    try:
        for last in child.heard():
            outcomes.update([last[2]] if last[0] == "ended" else [])
    except AssertionError as error:
        raise AssertionError(f"{last}: {error}") from None
    status = child.wait()
    child.close()
    assert status == 0, f"ended by signal {status} (14: it hung) after {last}"
    assert sum(outcomes.values()) == len(numbers)
    shutil.rmtree(folder)
    return outcomes


def main(folder: Path, files: int, seed: int) -> None:
    outcomes = Counter[str]()
    for begin in range(0, files, AT_ONCE):
        outcomes += run(folder / f"from {begin}", range(begin, min(files, begin + AT_ONCE)), seed)
    print(json.dumps({"files": files, "raw exceptions": 0, "crashes": 0, "hangs": 0, **dict(outcomes.most_common())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
