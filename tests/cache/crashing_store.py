"""Four processes read and write one cache and are killed at random moments; then the parent looks at what is left.

    python tests/cache/crashing_store.py FOLDER KILLS SEED

Prints counts as JSON; an assertion that fails ends it with a traceback. Run by `test_cache_damage.py`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from speaking import Child, Say

from precedent.cache import Completion, Selection, SQLiteStore, verify_cache
from precedent.cache.index import SimilarityIndex
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, unit_vector

PROCESSES = 4
ROUNDS_PER_CACHE = 25
TENANTS = ("a", "b")


def record(key: str, tenant: str) -> Completion:
    """The completion that belongs to a key: what is found can be compared with what was written."""
    tokens = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=48).digest(), "<u2").astype(int)
    return Completion(tuple(tokens.tolist()), "tok", "model", tenant, f"query {key}", text=f"{key} " * 60)


class Worker:
    """A process of its own: says what it is going to change, changes it, and says that it is done."""

    def __init__(self, folder: Path, name: str, say: Say) -> None:
        self._choose, self._name, self._say = random.Random(name), name, say
        self._store = SQLiteStore.open(folder)
        self._index = SimilarityIndex(self._store)
        self._mine: list[int] = []

    def work(self) -> None:
        """Until the process is killed."""
        number = 0
        while True:
            number += 1
            action = self._choose.choices(
                (self._insert, self._credit, self._read, self._recall, self._forget), (40, 20, 20, 18, 2)
            )[0]
            action(f"{self._name} {number}", self._choose.choice(TENANTS))

    def _insert(self, key: str, tenant: str) -> None:
        row_id = self._store.insert(record(key, tenant), unit_vector(len(key)), EMBEDDER)
        self._mine.append(row_id)
        self._say("inserted", row_id, key, tenant)

    def _credit(self, key: str, tenant: str) -> None:
        if self._mine:
            row_id = self._choose.choice(self._mine)
            self._say("crediting", row_id)
            self._store.credit({row_id: (1, 2)})
            self._say("credited", row_id)

    def _read(self, key: str, tenant: str) -> None:
        for one in self._store.since(tenant, "tok", 0):
            assert record(one.query.removeprefix("query "), tenant).token_ids == one.token_ids

    def _recall(self, key: str, tenant: str) -> None:
        assert len(self._index.search(unit_vector(3), tenant, "tok", 5)) <= 5

    def _forget(self, key: str, tenant: str) -> None:
        if not self._mine:
            return
        row_id = self._mine.pop(self._choose.randrange(len(self._mine)))
        self._say("forgetting", row_id)
        try:
            self._store.forget(Selection(ids=(row_id,)))
        except CacheError as error:
            if "run forget again" not in str(error):  # others hold the file: the record is gone all the same
                raise
        self._say("forgot", row_id)


def work(folder: Path, name: str, say: Say) -> None:
    Worker(folder, name, say).work()


class Expected:
    """What must be in the cache, and what may be."""

    def __init__(self) -> None:
        self.inserted: dict[int, tuple[str, str]] = {}
        self.may_be_gone: set[int] = set()
        self.gone: set[int] = set()
        self.most: dict[int, int] = {}
        self.least: dict[int, int] = {}

    def take(self, word: str, *values) -> None:
        """Note what a process said."""
        if word == "inserted":
            self.inserted[values[0]] = (values[1], values[2])
        elif word in ("crediting", "credited"):
            counted = self.most if word == "crediting" else self.least
            counted[values[0]] = counted.get(values[0], 0) + 1
        elif word == "forgetting":
            self.may_be_gone.add(values[0])
        else:
            self.gone.add(values[0])

    def check(self, folder: Path) -> None:
        """Open the cache and compare."""
        report = verify_cache(folder)
        assert report.findings == (), report.findings
        store = SQLiteStore.open(folder)
        found = {one.id: one for tenant in TENANTS for one in store.since(tenant, "tok", 0)}
        for row_id, (key, tenant) in self.inserted.items():
            if row_id in found:
                wanted = record(key, tenant)
                assert (found[row_id].token_ids, found[row_id].tenant) == (wanted.token_ids, tenant)
            else:
                assert row_id in self.may_be_gone, f"record {row_id} is lost"
        assert not self.gone & set(found), "a forgotten record is back"
        for row_id, one in found.items():
            assert self.least.get(row_id, 0) <= one.accepted <= self.most.get(row_id, 0)
            assert one.rejected == 2 * one.accepted
        vectors = {i for tenant in TENANTS for i in store.vectors_since(tenant, "tok", 0)[0].tolist()}
        assert vectors == set(found)
        store.close()


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill so many processes, four at a time."""
    choose, expected, acknowledged, rounds = random.Random(seed), Expected(), 0, -(-kills // PROCESSES)
    for number in range(rounds):
        if number % ROUNDS_PER_CACHE == 0:
            expected, cache = Expected(), folder / str(number)
            SQLiteStore.open(cache).close()
        names = [f"{seed} {number} {name}" for name in range(PROCESSES)]
        children = [Child(partial(work, cache, name)) for name in names]
        choose.shuffle(children)
        for child in children:
            time.sleep(choose.uniform(0.01, 0.25))
            child.kill()
        for child in children:
            child.wait()
            for words in child.heard():
                expected.take(*words)
                acknowledged += words[0] in ("inserted", "credited", "forgot")
            child.close()
        expected.check(cache)
    print(json.dumps({"kills": rounds * PROCESSES, "opens": rounds, "acknowledged": acknowledged}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
