"""Cache files to be damaged: closed, with their log, torn, and of another program."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from precedent.cache import Completion, EmbedderIdentity, Selection, SQLiteStore
from precedent_testing.store_contract import EMBEDDER, unit_vector

PAGE = 4096
TENANTS = ("a", "c")  # one bit apart

Content = dict[str, bytes]
"""The files of a cache by the endings of their names: "" (the file itself), "-wal", "-journal", "-shm"."""


def record(number: int) -> Completion:
    tokens = tuple(np.random.default_rng(number).integers(0, 50_000, 5 + number % 40).tolist())
    text = f"text {number} " * (1 + number % 90 * 10)
    return Completion(tokens, "tok", "model", TENANTS[number % 2], f"query {number}", text=text)


STORED = {record(number) for number in range(400)}
BASE, DONOR, NEW = range(40), range(100, 140), range(200, 230)


def fill(folder: Path, numbers: range, embedder: EmbedderIdentity = EMBEDDER) -> SQLiteStore:
    store = SQLiteStore.open(folder)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    for number in numbers:
        vector = np.resize(unit_vector(number), embedder.dimension) * (EMBEDDER.dimension / embedder.dimension) ** 0.5
        store.insert(record(number), vector.astype(np.float32), embedder)
    return store


def content_of(folder: Path) -> Content:
    """What there is of a cache; a log or journal without content is none."""
    files = {end: folder / f"precedent.sqlite{end}" for end in ("", "-wal", "-journal")}
    found = {end: file.read_bytes() for end, file in files.items() if file.exists()}
    return {end: data for end, data in found.items() if data or not end}


def write(folder: Path, content: Content) -> None:
    folder.mkdir()
    for end, data in content.items():
        (folder / f"precedent.sqlite{end}").write_bytes(data)


def bases(folder: Path) -> dict[str, Content]:
    """Caches to be damaged: closed, killed with its log, killed in a checkpoint; of others."""
    store = fill(folder / "base", BASE)
    store.forget(Selection(ids=(3, 8)))
    store.close()
    closed = content_of(folder / "base")
    store = fill(folder / "base", NEW)
    logged = content_of(folder / "base")
    store.close()
    folded = content_of(folder / "base")[""]
    other = fill(folder / "other", DONOR, EmbedderIdentity("other", "fingerprint-of-other", 6))
    donor = content_of(folder / "other")
    other.close()
    return {
        "closed": closed,
        "logged": logged,
        "torn": {"": folded[: len(closed[""]) + PAGE], "-wal": logged["-wal"]},
        "donor": donor,
        "foreign": foreign(folder / "foreign.sqlite"),
    }


def foreign(file: Path) -> Content:
    """Another program's database while that has it open."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, note TEXT)")
    connection.executemany("INSERT INTO notes (note) VALUES (?)", [(f"mine {n}" * 100,) for n in range(200)])
    found = {end: Path(f"{file}{end}").read_bytes() for end in ("", "-wal")}
    connection.close()
    return found
