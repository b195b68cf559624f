"""Damaged and hostile cache files, each verified, opened, read and written to.

    python tests/cache/damage.py FOLDER FILES SEED

A process of its own takes a few hundred of them, so that a crash or a hang is seen. Whatever is done to a file: only
errors of Precedent's own are raised, a file that is refused stays as it was, one that is set aside too, nothing is
served that was not stored, and an id is returned for what is stored alone. Prints counts as JSON; whatever fails ends
it with a traceback. Run by `test_cache_damage.py`.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from kills import Child, Say

from precedent.cache import Completion, EmbedderIdentity, Selection, SQLiteStore, verify_cache
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, unit_vector

AT_ONCE = 250
PATIENCE = 120
"""Seconds for one file, after which it counts as a hang."""

PAGE = 4096
TENANTS = ("a", "c")  # one bit apart

Content = dict[str, bytes]
"""The files of a cache by the endings of their names: "" (the file itself), "-wal", "-journal", "-shm"."""

# Files to be damaged


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
    torn = {"": content_of(folder / "base")[""][: len(closed[""]) + PAGE], "-wal": logged["-wal"]}
    other = fill(folder / "other", DONOR, EmbedderIdentity("other", "fingerprint-of-other", 6))
    donor = content_of(folder / "other")
    other.close()
    (folder / "foreign").mkdir()
    foreign = sqlite3.connect(folder / "foreign" / "precedent.sqlite", isolation_level=None)
    foreign.execute("PRAGMA journal_mode=WAL")
    foreign.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, note TEXT)")
    foreign.executemany("INSERT INTO notes (note) VALUES (?)", [(f"mine {n}" * 100,) for n in range(200)])
    found = content_of(folder / "foreign")
    foreign.close()
    return {"closed": closed, "logged": logged, "torn": torn, "donor": donor, "foreign": found}


# What is done to them


class Damage:
    """What may be done to a cache, each way by chance."""

    def __init__(self, choose: random.Random, known: dict[str, Content], folder: Path) -> None:
        self.choose, self.bases, self.folder = choose, known, folder
        self.base = choose.choice(("closed", "closed", "logged", "logged", "torn", "torn"))
        self.content, self.names = dict(known[self.base]), list[str]()
        for _ in range(choose.choice((1, 1, 1, 2, 3))):
            way = choose.choice(self.WAYS)
            way(self)
            self.names.append(way.__name__)

    def part(self) -> str:
        """The ending of one of the files, one with content if there is any."""
        return self.choose.choice([end for end, data in sorted(self.content.items()) if data] or [""])

    def place(self, data: bytes | bytearray) -> int:
        return self.choose.randrange(max(1, len(data)))

    def edit(self, end: str, at: int, data: bytes) -> None:
        whole = self.content.get(end, b"")
        self.content[end] = (whole[:at] + data + whole[at + len(data) :])[: max(len(whole), at + len(data))]

    def number(self, size: int) -> bytes:
        numbers = (0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, self.choose.randrange(2**32))
        return self.choose.choice(numbers).to_bytes(8, "big")[8 - size :]

    def flip(self) -> None:
        """One bit or many, anywhere or in the first page."""
        end = self.part()
        data = bytearray(self.content.get(end) or b"\x00")
        most = min(len(data), self.choose.choice((100, 200, PAGE, 2**40, 2**40)))
        for _ in range(self.choose.choice((1, 1, 1, 3, 10, 50, 500))):
            data[self.choose.randrange(most)] ^= 1 << self.choose.randrange(8)
        self.content[end] = bytes(data)

    def cut(self) -> None:
        end = self.part()
        size = self.place(data := self.content.get(end, b""))
        self.content[end] = data[: self.choose.choice((size, size // PAGE * PAGE, size % 600))]

    def splice(self) -> None:
        """A piece goes, comes twice, or comes from elsewhere."""
        end = self.part()
        data, size = self.content.get(end, b""), self.choose.choice((1, 7, 512, PAGE, PAGE + 24, 3 * PAGE))
        at, other = self.place(data), self.choose.choice(list(self.bases.values()))[""]
        begin = self.place(other)
        piece = self.choose.choice((b"", data[at : at + 2 * size], other[begin : begin + size]))
        self.content[end] = data[:at] + piece + data[at + size :]

    def edit_header(self) -> None:
        """One field of the file's header: sizes, counts, versions, the freelist, the encoding, the marks."""
        sizes = {16: 2, 18: 1, 19: 1, 20: 1, 21: 1, 22: 1, 23: 1}
        at = self.choose.choice((*sizes, *range(24, 72, 4), 92, 96))
        self.edit("", at, self.number(sizes.get(at, 4)))

    def grow(self) -> None:
        end = self.part()
        more = self.choose.randbytes(self.choose.choice((1, 100, PAGE, 3 * PAGE)))
        self.content[end] = self.content.get(end, b"") + more

    def replace(self) -> None:
        self.content[self.part()] = self.choose.choice(
            (b"", b"\x00", b"notes of mine\n" * 99, b"SQLite format 3\x00", self.choose.randbytes(5000), bytes(9000))
        )

    def log_of_another(self) -> None:
        self.content["-wal"] = self.bases[self.choose.choice(("donor", "foreign", "logged"))]["-wal"]

    def add_journal(self) -> None:
        """What SQLite may take for a transaction to be rolled back."""
        pages = self.choose.choice((0, 1, 2**32 - 1))
        numbers = b"".join(number.to_bytes(4, "big") for number in (pages, 0, 3, 512, PAGE))
        page = (1).to_bytes(4, "big") + self.bases["foreign"][""][:PAGE] + bytes(4)
        whole = (bytes.fromhex("d9d505f920a163d7") + numbers).ljust(512, b"\x00") + page
        self.content["-journal"] = self.choose.choice((whole, self.choose.randbytes(900), b"x"))

    # --- damage that a program would do

    def through_sqlite(self, *statements: str) -> None:
        """Statements that are run on the file, as far as it lets them."""
        place = self.folder / "edited"
        shutil.rmtree(place, ignore_errors=True)
        write(place, self.content)
        connection = sqlite3.connect(place / "precedent.sqlite", isolation_level=None)
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError, MemoryError):
            for statement in statements:
                connection.execute(statement)
        connection.close()
        self.content = content_of(place)

    def hostile_schema(self) -> None:
        self.through_sqlite(self.choose.choice(HOSTILE_SCHEMAS))

    def hostile_values(self) -> None:
        """A value of another type or size in any column of any table."""
        table, column = self.choose.choice([(table, name) for table, names in COLUMNS.items() for name in names])
        value = self.choose.choice(HOSTILE_VALUES)
        some = self.choose.choice(("", "WHERE rowid % 3 = 0")) if table == "completion" else ""
        self.through_sqlite(f"UPDATE OR IGNORE {table} SET {column} = {value} {some}")

    def lose_rows(self) -> None:
        self.through_sqlite(f"DELETE FROM {self.choose.choice(('meta', 'usage', 'sqlite_sequence', 'completion'))}")

    def renumber(self) -> None:
        name = self.choose.choice(("user_version", "application_id", "schema_version", "default_cache_size"))
        value = self.choose.choice((0, 1, 2, 3, 999, -1, 2**31 - 1))
        self.through_sqlite("PRAGMA journal_mode=DELETE", f"PRAGMA {name}={value}")

    WAYS: tuple[Callable[[Damage], None], ...] = (
        *(flip, flip, cut, splice, edit_header, grow, replace, log_of_another, add_journal),
        *(hostile_schema, hostile_values, lose_rows, renumber),
    )


HOSTILE_VALUES = (
    *("NULL", "'abc'", "''", "-1", "0", "1e300", "9223372036854775807", "-9223372036854775808", "0.5", "'1'"),
    *("x''", "x'ff'", "zeroblob(100000)", "CAST(text AS BLOB)", "randomblob(8)", "'[[[['", "'{}'", "char(0)"),
)

COLUMNS = {
    "completion": (
        *("tenant", "tokenizer", "identity", "created", "count", "hits", "accepted", "rejected", "size", "model"),
        *("prompt_fingerprint", "tools", "workflow_step", "checksum", "vector_checksum", "token_ids", "query", "text"),
        *("vector", "id"),
    ),
    "usage": ("tenant", "bytes", "records"),
    "meta": ("key", "value"),
    "sqlite_sequence": ("name", "seq"),
}

HOSTILE_SCHEMAS = (
    "CREATE TRIGGER planted AFTER INSERT ON completion BEGIN DELETE FROM completion WHERE id = new.id; END",
    "CREATE TRIGGER planted BEFORE INSERT ON completion BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TRIGGER planted AFTER INSERT ON completion BEGIN UPDATE completion SET id = 10000 WHERE id = new.id; END",
    "CREATE TRIGGER planted AFTER UPDATE ON completion BEGIN UPDATE completion SET text = 'x' WHERE id = new.id; END",
    "CREATE VIEW planted AS SELECT * FROM completion",
    "CREATE TABLE planted (x)",
    "CREATE TABLE planted (x CHECK (randomblob(1000000000) IS NOT NULL))",
    "CREATE INDEX planted ON completion (abs(-9223372036854775808 + id))",
    "CREATE VIRTUAL TABLE planted USING fts5(x)",
    "DROP INDEX completion_partition",
    "DROP INDEX completion_identity",
    "DROP TRIGGER completion_came",
    "DROP TRIGGER completion_went",
    "DROP TABLE meta",
    "DROP TABLE usage",
    "DROP TABLE completion",
    "ALTER TABLE completion RENAME TO elsewhere",
    "ALTER TABLE completion ADD COLUMN more TEXT DEFAULT 'x'",
    "ALTER TABLE completion RENAME COLUMN text TO words",
    "ANALYZE",
)

# What comes of it


def as_new(one: Completion) -> Completion:
    return replace(one, id=0, created=0.0, count=1, hits=0, accepted=0, rejected=0)


def tried(what: Callable[[], object]) -> bool:
    """Whether it was done; an error of Precedent's own is one line."""
    said = None
    try:
        what()
    except CacheError as error:
        said = str(error)
    assert "\n" not in (said or ""), said
    return said is None


def read(store: SQLiteStore) -> None:
    """Everything a drafter and a person would read: all records are served as they were stored."""
    for tenant in TENANTS:
        for one in store.since(tenant, "tok", 0):
            assert as_new(one) in STORED, f"served what was never stored: {one}"
            assert one.tenant == tenant, "a record of another tenant"
        store.ids(tenant, "tok")
        ids, vectors = store.vectors_since(tenant, "tok", 0)
        assert len(ids) == len(vectors)
    assert all(as_new(one) in STORED for one in store.list(Selection(), None))
    store.list(Selection(containing="text 7"), 10)
    store.records(Selection(), 0, 10**6)
    store.stats()
    store.epoch()


def use(store: SQLiteStore, choose: random.Random) -> None:
    """Store, credit, forget; an id is of what is stored."""
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


def case(cache: Path, content: Content, choose: random.Random) -> str:
    """Everything that is done with one file; returns what became of it."""
    write(cache, content)
    before, stores = content_of(cache), list[SQLiteStore]()
    tried(lambda: verify_cache(cache))
    assert content_of(cache) == before, "verified and changed"
    if not tried(lambda: stores.append(SQLiteStore.open(cache))):
        assert content_of(cache) == before, "refused and changed"
        outcome = "refused"
    else:
        (store,), kept = stores, cache / "precedent.sqlite.damaged"
        whole = all([tried(lambda: read(store)), tried(lambda: use(store, choose)), tried(lambda: read(store))])
        store.close()
        outcome = "set aside" if kept.exists() else "served" if whole else "served in part"
        if kept.exists():
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
        damage = Damage(choose, known, folder)
        say("begins", number, damage.base, damage.names)
        signal.alarm(PATIENCE)
        say("ended", number, case(folder / str(number), damage.content, choose))
        shutil.rmtree(folder / str(number))


def main(folder: Path, files: int, seed: int) -> None:
    outcomes = Counter[str]()
    for begin in range(0, files, AT_ONCE):
        place, numbers, last = folder / f"from {begin}", range(begin, min(files, begin + AT_ONCE)), None
        place.mkdir()
        child = Child(lambda say, place=place, numbers=numbers: take(place, numbers, seed, say))
        try:
            for last in child.heard():
                outcomes.update([last[2]] if last[0] == "ended" else [])
        except AssertionError as error:
            raise AssertionError(f"{last}: {error}") from None
        status = child.wait()
        assert status == 0, f"ended by signal {status} (-14: it hung) after {last}"
        shutil.rmtree(place)
    assert outcomes.total() == files
    print(json.dumps({"files": files, **outcomes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
