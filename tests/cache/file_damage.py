"""What may be done to a cache file, each way by chance: bits, pages, lengths, logs, rows and schemas."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sound_files import PAGE, Content, content_of, write


@dataclass
class Damage:
    """What may be done to a cache, each way by chance."""

    choose: random.Random
    bases: dict[str, Content]
    folder: Path

    def content(self) -> tuple[str, Content]:
        """What was done, and the files."""
        base = self.choose.choice(("closed", "closed", "logged", "logged", "torn", "torn"))
        content = dict(self.bases[base])
        names = []
        for _ in range(self.choose.choice((1, 1, 1, 2, 3))):
            way = self.choose.choice(self.ways())
            way(content)
            names.append(way.__name__)
        return f"{base}: {', '.join(names)}", content

    def ways(self) -> tuple[Callable[[Content], None], ...]:
        return (
            *(self.flip, self.flip, self.cut, self.splice, self.fill_a_page, self.swap_pages),
            *(self.edit_header, self.edit_log_header, self.edit_page_header, self.grow, self.replace, self.drop_log),
            *(self.log_of_another, self.part_of_another_log, self.add_journal, self.add_index),
            *(self.hostile_schema, self.hostile_values, self.lose_rows, self.renumber, self.edit_schema_rows),
        )

    def part(self, content: Content) -> str:
        """The ending of one of the files, one with content if there is any."""
        return self.choose.choice([end for end, data in sorted(content.items()) if data] or [""])

    def place(self, data: bytes | bytearray) -> int:
        return self.choose.randrange(max(1, len(data)))

    def flip(self, content: Content) -> None:
        """One bit or many, anywhere or in the first page."""
        end = self.part(content)
        data = bytearray(content.get(end) or b"\x00")
        most = min(len(data), self.choose.choice((100, 200, PAGE, 2**40, 2**40)))
        for _ in range(self.choose.choice((1, 1, 1, 3, 10, 50, 500))):
            data[self.choose.randrange(most)] ^= 1 << self.choose.randrange(8)
        content[end] = bytes(data)

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
        page = self.place(content.get(end, b"")) // PAGE * PAGE
        filled = self.choose.choice((bytes(PAGE), b"\xff" * PAGE, self.choose.randbytes(PAGE)))
        self.edit(content, end, page, filled)

    def swap_pages(self, content: Content) -> None:
        data = content.get("", b"")
        one, two = (self.place(data) // PAGE * PAGE for _ in range(2))
        self.edit(content, "", one, data[two : two + PAGE])
        self.edit(content, "", two, data[one : one + PAGE])

    def edit(self, content: Content, end: str, at: int, data: bytes) -> None:
        whole = content.get(end, b"")
        content[end] = (whole[:at] + data + whole[at + len(data) :])[: max(len(whole), at + len(data))]

    def number(self, size: int) -> bytes:
        numbers = (0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, self.choose.randrange(2**32))
        return self.choose.choice(numbers).to_bytes(8, "big")[8 - size :]

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
            (b"", b"\x00", b"notes of mine\n" * 99, b"SQLite format 3\x00", self.choose.randbytes(5000), bytes(9000))
        )

    def drop_log(self, content: Content) -> None:
        content.pop("-wal", None)

    def log_of_another(self, content: Content) -> None:
        content["-wal"] = self.bases[self.choose.choice(("donor", "foreign", "logged"))]["-wal"]

    def part_of_another_log(self, content: Content) -> None:
        """Frames of one log behind those of another."""
        mine, other = content.get("-wal", self.bases["logged"]["-wal"]), self.bases["donor"]["-wal"]
        frames = self.choose.randrange(1, 40)
        content["-wal"] = mine[: 32 + frames * (PAGE + 24)] + other[32 + frames * (PAGE + 24) :]

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
        some = self.choose.choice(("", "WHERE rowid % 3 = 0")) if table == "completion" else ""
        self.through_sqlite(content, f"UPDATE OR IGNORE {table} SET {column} = {value} {some}")

    def lose_rows(self, content: Content) -> None:
        table = self.choose.choice(("meta", "usage", "sqlite_sequence", "completion"))
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
