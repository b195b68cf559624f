"""Caches to be damaged, what a repair saves of them, and the damaged files that it keeps."""

from __future__ import annotations

from pathlib import Path

from precedent.cache import SQLiteStore, verify_cache
from precedent.testing.store_contract import EMBEDDER, completion, unit_vector

COUNT = 40


def fill(store: SQLiteStore, numbers: range) -> None:
    for n in numbers:
        store.insert(completion(n, n + 1, text=f"text {n} " * (30 * (n % 40))), unit_vector(n), EMBEDDER)


def filled(folder: Path, numbers: range = range(COUNT)) -> Path:
    store = SQLiteStore.open(folder)
    fill(store, numbers)
    store.close()
    return folder / "precedent.sqlite"


def logged(folder: Path) -> tuple[bytes, bytes]:
    """A file of COUNT records and a log of as many others, as a killed process leaves them."""
    file = filled(folder)
    store = SQLiteStore.open(file)
    fill(store, range(100, 100 + COUNT))
    found = file.read_bytes(), Path(f"{file}-wal").read_bytes()
    store.close()
    return found


def repaired(file: Path) -> list[int]:
    """The first tokens of all records after a repair, each of which is as it was written.

    So are its vectors, but where the page is lost that says who made them: then there are none.
    """
    report = verify_cache(file, repair=True)
    assert report.sound
    assert verify_cache(file).findings == ()
    store = SQLiteStore.open(file)
    found = store.since("default", "tok", 0)
    for one in found:
        n = one.token_ids[0]
        assert (one.token_ids, one.text) == ((n, n + 1), f"text {n} " * (30 * (n % 40)))
    vectors = dict(zip(*(part.tolist() for part in store.vectors_since("default", "tok", 0)), strict=True))
    wanted = {one.id: unit_vector(one.token_ids[0]).tolist() for one in found}
    assert vectors == (wanted if store.embedder() else {})
    store.close()
    assert report.records == len(found)
    return [one.token_ids[0] for one in found]


def kept(file: Path, number: int = 1) -> Path:
    return file.with_name(f"{file.name}.damaged" + ("" if number == 1 else f"-{number}"))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(("-wal", "-shm", "-index"))}
