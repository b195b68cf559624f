"""Damaged and hostile cache files, each opened, read, written to, verified and repaired.

    python tests/cache/damaged_files.py FOLDER FILES SEED

A process of its own takes a few hundred of them, so that a crash or a hang is seen. Whatever is done to a file: only
errors of Precedent's own are raised, a file that is refused stays as it was, nothing is served that was not stored, an
id is returned for what is stored alone, and a repair leaves a sound cache and the damaged file beside it. Prints counts
as JSON; whatever fails ends it with a traceback. Run by `test_cache_damage.py`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precedent.cache import EmbedderIdentity, NewCompletion, Selection, SQLiteStore, verify_cache
from precedent.cache.store.schema import APPLICATION_ID, FORMATS
from precedent.drafters.matching.token_index import sorted_segment
from precedent.errors import CacheError
from precedent.testing.store_contract import EMBEDDER, unit_vector

AT_ONCE = 250
PATIENCE = 120
"""Seconds for one file, after which it counts as a hang."""

PAGE = 4096
TENANTS = ("a", "c")  # one bit apart

Content = dict[str, bytes]
"""The files of a cache by the endings of their names: "" (the file itself), "-wal", "-journal", "-shm"."""


def record(number: int) -> NewCompletion:
    tokens = tuple(np.random.default_rng(number).integers(0, 50_000, 5 + number % 40).tolist())
    text = f"text {number} " * (1 + number % 90 * 10)
    return NewCompletion(tokens, "tok", "model", TENANTS[number % 2], f"query {number}", text=text)


STORED = {record(number) for number in range(400)}
TOKENS = {one.token_ids for one in STORED}
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
    """Caches to be damaged: closed, killed with its log, killed in a checkpoint; of the first format; of others."""
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
        "first format": {"": in_first_format(folder / "old.sqlite", folder / "base" / "precedent.sqlite")},
        "donor": donor,
        "foreign": foreign(folder / "foreign.sqlite"),
    }


def in_first_format(file: Path, source: Path) -> bytes:
    connection = sqlite3.connect(file, isolation_level=None)
    script = next(script for number, script in FORMATS if number == 1)
    connection.executescript(f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version=1; {script}")
    connection.execute("ATTACH ? AS today", (str(source),))
    names = ", ".join(row[1] for row in connection.execute("PRAGMA main.table_info(completion)"))
    connection.execute(f"INSERT INTO completion SELECT {names} FROM today.completion")
    connection.execute("INSERT INTO meta SELECT * FROM today.meta WHERE key = 'embedder'")
    connection.close()
    return file.read_bytes()


def foreign(file: Path) -> Content:
    """Another program's database while that has it open."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, note TEXT)")
    connection.executemany("INSERT INTO notes (note) VALUES (?)", [(f"mine {n}" * 100,) for n in range(200)])
    found = {end: Path(f"{file}{end}").read_bytes() for end in ("", "-wal")}
    connection.close()
    return found


# --- damage ----------------------------------------------------------------------------------------------------------


@dataclass
class Damage:
    """What may be done to a cache, each way by chance."""

    choose: random.Random
    bases: dict[str, Content]
    folder: Path

    def content(self) -> tuple[str, Content]:
        """What was done, and the files."""
        base = self.choose.choice(("closed", "closed", "logged", "logged", "torn", "torn", "first format"))
        content = dict(self.bases[base])
        names = []
        for _ in range(self.choose.choice((1, 1, 1, 2, 3))):
            way = self.choose.choice(self.ways())
            way(content)
            names.append(way.__name__)
        return f"{base}: {', '.join(names)}", content

    def ways(self) -> tuple[Callable[[Content], None], ...]:
        return (
            *(self.flip_a_bit, self.flip_bits, self.flip_in_first_page, self.cut, self.splice, self.fill_a_page),
            *(self.swap_pages, self.edit_header, self.edit_log_header, self.edit_page_header, self.grow, self.replace),
            *(
                self.drop_log,
                self.log_of_another,
                self.part_of_another_log,
                self.empty,
                self.add_journal,
                self.add_index,
            ),
            *(self.hostile_schema, self.hostile_values, self.lose_rows, self.renumber, self.edit_schema_rows),
        )

    def part(self, content: Content) -> str:
        """The ending of one of the files, one with content if there is any."""
        return self.choose.choice([end for end, data in sorted(content.items()) if data] or [""])

    def place(self, data: bytes | bytearray) -> int:
        return self.choose.randrange(max(1, len(data)))

    def flip_a_bit(self, content: Content, times: int = 1, most: int = 2**40) -> None:
        end = self.part(content)
        data = bytearray(content.get(end) or b"\x00")
        for _ in range(times):
            data[self.choose.randrange(min(most, len(data)))] ^= 1 << self.choose.randrange(8)
        content[end] = bytes(data)

    def flip_bits(self, content: Content) -> None:
        self.flip_a_bit(content, times=self.choose.choice((5, 50, 500)))

    def flip_in_first_page(self, content: Content) -> None:
        self.flip_a_bit(content, times=self.choose.choice((1, 3, 10)), most=self.choose.choice((100, 200, PAGE)))

    def cut(self, content: Content) -> None:
        end = self.part(content)
        size = self.place(content.get(end, b""))
        content[end] = content.get(end, b"")[: self.choose.choice((size, size // PAGE * PAGE, size % 600))]

    def splice(self, content: Content) -> None:
        """A piece goes, comes twice, or comes from elsewhere."""
        end = self.part(content)
        data, size = content.get(end, b""), self.choose.choice((1, 7, 512, PAGE, PAGE + 24, 3 * PAGE))
        at, other = self.place(data), self.choose.choice(list(self.bases.values()))[""]
        begin = self.place(other)
        piece = self.choose.choice((b"", data[at : at + 2 * size], other[begin : begin + size]))
        content[end] = data[:at] + piece + data[at + size :]

    def fill_a_page(self, content: Content) -> None:
        end = self.part(content)
        data = content.get(end, b"")
        at = self.place(data) // PAGE * PAGE
        filled = self.choose.choice((bytes(PAGE), b"\xff" * PAGE, self.choose.randbytes(PAGE)))
        content[end] = data[:at] + filled[: len(data) - at] + data[at + PAGE :]

    def swap_pages(self, content: Content) -> None:
        data = bytearray(content.get("", b""))
        one, two = (self.place(data) // PAGE * PAGE for _ in range(2))
        first, second = bytes(data[one : one + PAGE]), bytes(data[two : two + PAGE])
        if len(first) == len(second):
            data[one : one + PAGE], data[two : two + PAGE] = second, first
        content[""] = bytes(data)

    def number(self, size: int) -> bytes:
        numbers = (0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, self.choose.randrange(2**32))
        return self.choose.choice(numbers).to_bytes(8, "big")[8 - size :]

    def edit(self, content: Content, end: str, at: int, data: bytes) -> None:
        whole = content.get(end, b"")
        content[end] = (whole[:at] + data + whole[at + len(data) :])[: max(len(whole), at + len(data))]

    def edit_header(self, content: Content) -> None:
        """One field of the file's header: sizes, counts, versions, the freelist, the encoding, the marks."""
        sizes = {16: 2, 18: 1, 19: 1, 20: 1, 21: 1, 22: 1, 23: 1}
        at = self.choose.choice((*sizes, *range(24, 72, 4), 92, 96))
        self.edit(content, "", at, self.number(sizes.get(at, 4)))

    def edit_log_header(self, content: Content) -> None:
        if "-wal" in content:
            self.edit(content, "-wal", self.choose.choice(range(0, 56, 4)), self.number(4))

    def edit_page_header(self, content: Content) -> None:
        """Kind of page, free blocks, number of cells, where cells begin, the right child."""
        field, size = self.choose.choice(((0, 1), (1, 2), (3, 2), (5, 2), (7, 1), (8, 2), (8, 4), (10, 2)))
        page = self.place(content.get("", b"")) // PAGE * PAGE
        self.edit(content, "", page + field + (100 if page == 0 else 0), self.number(size))

    def grow(self, content: Content) -> None:
        end = self.part(content)
        content[end] = content.get(end, b"") + self.choose.randbytes(self.choose.choice((1, 100, PAGE, 3 * PAGE)))

    def replace(self, content: Content) -> None:
        content[self.part(content)] = self.choose.choice(
            (b"\x00", b"notes of mine\n" * 99, b"SQLite format 3\x00", self.choose.randbytes(5000), bytes(9000))
        )

    def drop_log(self, content: Content) -> None:
        content.pop("-wal", None)

    def log_of_another(self, content: Content) -> None:
        content["-wal"] = (
            self.choose.choice(("donor", "foreign", "logged"))
            and self.bases[self.choose.choice(("donor", "foreign", "logged"))]["-wal"]
        )

    def part_of_another_log(self, content: Content) -> None:
        """Frames of one log behind those of another."""
        mine, other = content.get("-wal", self.bases["logged"]["-wal"]), self.bases["donor"]["-wal"]
        frames = self.choose.randrange(1, 40)
        content["-wal"] = mine[: 32 + frames * (PAGE + 24)] + other[32 + frames * (PAGE + 24) :]

    def empty(self, content: Content) -> None:
        content[self.part(content)] = b""

    def add_journal(self, content: Content) -> None:
        """What SQLite may take for a transaction to be rolled back."""
        magic = bytes.fromhex("d9d505f920a163d7")
        pages = self.choose.choice((0, 1, 2**32 - 1)).to_bytes(4, "big")
        header = magic + pages + bytes(4) + (3).to_bytes(4, "big") + (512).to_bytes(4, "big") + PAGE.to_bytes(4, "big")
        page = (1).to_bytes(4, "big") + self.bases["foreign"][""][:PAGE] + bytes(4)
        content["-journal"] = self.choose.choice((header.ljust(512, b"\x00") + page, self.choose.randbytes(900), b"x"))

    def add_index(self, content: Content) -> None:
        """An index of the log as a dead process may have left it."""
        content["-shm"] = self.choose.choice((bytes(32768), self.choose.randbytes(32768), b"\xff" * 100))

    # --- damage that a program would do

    def through_sqlite(self, content: Content, *statements: str) -> None:
        """Statements that are run on the file, as far as it lets them."""
        place = self.folder / "edited"
        shutil.rmtree(place, ignore_errors=True)
        write(place, content)
        connection = sqlite3.connect(place / "precedent.sqlite", isolation_level=None)
        try:
            for statement in statements:
                connection.execute(statement)
        except (sqlite3.Error, UnicodeDecodeError, MemoryError):
            pass
        finally:
            connection.close()
        content.clear()
        content.update(content_of(place))

    def hostile_schema(self, content: Content) -> None:
        self.through_sqlite(content, self.choose.choice(HOSTILE_SCHEMAS))

    def hostile_values(self, content: Content) -> None:
        """A value of another type or size in any column of any table."""
        table, column = self.choose.choice([(t, c) for t, columns in COLUMNS.items() for c in columns])
        value = self.choose.choice(HOSTILE_VALUES)
        some = self.choose.choice(("", "WHERE rowid % 3 = 0")) if table in ("completion", "gone") else ""
        self.through_sqlite(content, f"UPDATE OR IGNORE {table} SET {column} = {value} {some}")

    def lose_rows(self, content: Content) -> None:
        table = self.choose.choice(("meta", "usage", "gone", "sqlite_sequence", "completion"))
        self.through_sqlite(content, f"DELETE FROM {table}")

    def renumber(self, content: Content) -> None:
        name = self.choose.choice(("user_version", "application_id", "schema_version", "default_cache_size"))
        value = self.choose.choice((0, 1, 2, 3, 999, -1, 2**31 - 1))
        self.through_sqlite(content, "PRAGMA journal_mode=DELETE", f"PRAGMA {name}={value}")

    def edit_schema_rows(self, content: Content) -> None:
        column = self.choose.choice(("type", "name", "tbl_name", "rootpage", "sql"))
        value = self.choose.choice((*HOSTILE_VALUES, "2", "3", "4", "6", "'table'", "'CREATE TABLE t (x)'"))
        row = self.choose.randrange(1, 16)
        self.through_sqlite(
            content, "PRAGMA writable_schema=ON", f"UPDATE sqlite_master SET {column} = {value} WHERE rowid = {row}"
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
    "gone": ("epoch", "id"),
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
    "DROP TABLE gone",
    "DROP TABLE meta",
    "DROP TABLE usage",
    "DROP TABLE completion",
    "ALTER TABLE completion RENAME TO elsewhere",
    "ALTER TABLE completion ADD COLUMN more TEXT DEFAULT 'x'",
    "ALTER TABLE completion RENAME COLUMN text TO words",
    "ANALYZE",
)


# --- use -------------------------------------------------------------------------------------------------------------


def as_new(one: NewCompletion) -> NewCompletion:
    fields = (one.token_ids, one.tokenizer, one.model, one.tenant, one.query)
    return NewCompletion(*fields, one.prompt_fingerprint, one.tools, one.workflow_step, one.text)


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
        held = {one.id: one.token_ids for one in found}
        ids, vectors = store.vectors_since(tenant, "tok", 0)
        assert len(ids) == len(vectors)
        partition = store.partition(tenant, "tok")
        partition.lengths()
        partition.most_tokens()
        for segment in partition.segments(partition.directory()):
            ends = [*segment.completions["begin"][1:].tolist(), segment.tokens.size]
            for begin, end in zip(segment.completions["begin"], ends, strict=True):
                assert tuple(segment.tokens[begin + 1 : end].tolist()) in TOKENS
        lengths = {row_id: len(tokens) for row_id, tokens in held.items()}
        partition.seal(lengths, lambda ids, held=held: sorted_segment({i: held[i] for i in ids.tolist()}))
        vectors_of = store.partition_vectors(tenant, "tok")
        for page, vectors in vectors_of.pages(vectors_of.ids()):
            assert len(page) == len(vectors)
    listed = store.list(Selection(), None)
    assert all(as_new(one) in STORED for one in listed)
    store.list(Selection(containing="text 7"), 10)
    store.records(Selection(), 0, 10**6)
    store.stats()
    store.gone_since(store.epoch())
    store.gone_since(0)
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
    if choose.random() < 0.7:  # else it is repaired as it is
        store = opened(cache)
        if store is not None:
            whole = tried(lambda: read(store))
            whole &= tried(lambda: use(store, choose))
            whole &= tried(lambda: read(store))
            store.close()
            outcome = "served" if whole else "served in part"
    damaged = content_of(cache)
    if tried(lambda: verify_cache(cache, repair=True)):
        outcome += ", repaired"
        assert verify_cache(cache).sound
        store = SQLiteStore.open(cache)
        read(store)
        assert use(store, choose) > 0, "a repaired cache stores again"
        store.close()
        kept = cache / "precedent.sqlite.damaged"
        if kept.exists():
            assert kept.read_bytes() == damaged[""], "the damaged file is kept as it was"
            assert "-wal" not in damaged or Path(f"{kept}-wal").read_bytes() == damaged["-wal"]
    else:
        outcome += ", cannot be repaired"
        assert content_of(cache) == damaged
    assert not [path for path in cache.iterdir() if path.name.startswith(".")], "nothing is left half-made"
    return outcome


# --- processes -------------------------------------------------------------------------------------------------------


def worker(folder: Path, numbers: range, seed: int, speak: int) -> None:
    """One file after the other; says which one begins and what became of it."""
    known = bases(folder)
    for number in numbers:
        choose = random.Random(seed * 10**7 + number)
        what, content = Damage(choose, known, folder).content()
        os.write(speak, (json.dumps(["begins", number, what]) + "\n").encode())
        signal.alarm(PATIENCE)
        try:
            outcome = case(folder / str(number), content, choose)
        except BaseException:
            os.write(speak, (json.dumps(["failed", number, f"{what}\n{traceback.format_exc()}"]) + "\n").encode())
            return
        os.write(speak, (json.dumps(["ended", number, outcome]) + "\n").encode())
        shutil.rmtree(folder / str(number))


def run(folder: Path, numbers: range, seed: int) -> Counter[str]:
    """A process that takes these files: what became of each; an assertion fails where it crashed, hung or raised."""
    folder.mkdir()
    hear, speak = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        try:
            worker(folder, numbers, seed, speak)
        finally:
            os._exit(0)
    os.close(speak)
    outcomes, last = Counter[str](), None
    with os.fdopen(hear) as said:
        for line in said:
            last = json.loads(line)
            assert last[0] != "failed", f"file {last[1]}: {last[2]}"
            outcomes.update([last[2]] if last[0] == "ended" else [])
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"ended by signal {status} (14: it hung) after {last}"
    assert sum(outcomes.values()) == len(numbers)
    shutil.rmtree(folder)
    return outcomes


def main(folder: Path, files: int, seed: int) -> None:
    sorted_segment({1: [1, 2], 2: [3]})  # compiled before the first fork
    outcomes = Counter[str]()
    for begin in range(0, files, AT_ONCE):
        outcomes += run(folder / f"from {begin}", range(begin, min(files, begin + AT_ONCE)), seed)
    print(json.dumps({"files": files, "raw exceptions": 0, "crashes": 0, "hangs": 0, **dict(outcomes.most_common())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
