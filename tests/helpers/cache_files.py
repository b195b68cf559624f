"""Cache files: filled, left behind by killed processes, changed behind their back, and refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.errors import CacheError, CacheMismatchError
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector

COUNT = 30
PAGE = 4096


def fill(store: SQLiteStore, numbers: range = range(COUNT), tenant: str = "default") -> None:
    for n in numbers:
        store.insert(completion(n, n + 1, tenant=tenant, text=f"text {n} " * 200), unit_vector(n), EMBEDDER)


def filled(folder: Path, numbers: range = range(COUNT)) -> Path:
    """A closed cache; returns its file."""
    store = SQLiteStore.open(folder)
    fill(store, numbers)
    store.close()
    return folder / "precedent.sqlite"


def contents(file: Path) -> dict[str, bytes]:
    """File, log and journal."""
    return {end: Path(f"{file}{end}").read_bytes() for end in ("", "-wal", "-journal") if Path(f"{file}{end}").exists()}


def write(folder: Path, found: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for end, data in found.items():
        (folder / f"precedent.sqlite{end}").write_bytes(data)
    return folder / "precedent.sqlite"


def logged(folder: Path) -> dict[str, bytes]:
    """What a process leaves that is killed before its log is folded in, and the file as that would have become."""
    file = filled(folder)
    store = SQLiteStore.open(file)
    fill(store, range(100, 100 + COUNT))
    found = contents(file)
    store.close()
    return {**found, "folded": file.read_bytes()}


def changed(file: Path, *statements: str) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def refused(file: Path, match: str, kind: type[CacheError] = CacheMismatchError) -> None:
    """Opening and verifying raise, in one line; file, log and journal stay as they were."""
    before = contents(file)
    for use in (SQLiteStore.open, verify_cache):
        with pytest.raises(kind, match=match) as caught:
            use(file)
        assert "\n" not in str(caught.value)
    assert contents(file) == before


def tokens_in(file: Path) -> list[int]:
    store = SQLiteStore.open(file)
    found = sorted(one.token_ids[0] for one in store.list(Selection(), None))
    store.close()
    return found
