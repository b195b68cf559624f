"""Pages, logs and rows read without SQLite are what SQLite reads, wherever the log is cut short."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precedent.cache.maintain.cells import rows_on
from precedent.cache.store.pages import Pages, checksum

PAGE_SIZES = (512, 1024, 4096, 65536)

values = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, -1, 127, 128, -32769, 2**23, -(2**31), 2**47 - 1, 2**47]),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, 9000), st.integers(0, 255)),
)
tables = st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.tuples(values, values), max_size=25)


def with_log(file: Path, page_bytes: int = 4096) -> sqlite3.Connection:
    """A database whose log is only folded in when it is told to."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(f"PRAGMA page_size={page_bytes}")
    for setting in ("journal_mode=WAL", "wal_autocheckpoint=0", "synchronous=OFF"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x, y)")
    return connection


def read_by_pages(file: Path) -> dict[int, tuple]:
    """The rows of the table, found on pages in any order."""
    log = file.with_name(file.name + "-wal")
    with file.open("rb") as opened, (log if log.exists() else file).open("rb") as opened_log:
        pages = Pages(opened, opened_log if log.exists() else None)
        rows = [row for number in range(1, pages.count + 1) for row in rows_on(number, pages)]
    return {row.rowid: row.values[1:] for row in rows if len(row.values) == 3 and row.values[0] is None}


def read_by_sqlite(file: Path) -> dict[int, tuple]:
    connection = sqlite3.connect(file)
    try:
        return {row[0]: row[1:] for row in connection.execute("SELECT * FROM t")}
    finally:
        connection.close()


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
@given(rows=tables)
def test_every_row_is_read_as_sqlite_reads_it(tmp_path_factory, page_bytes, rows):
    file = tmp_path_factory.mktemp("pages") / "a.db"
    connection = with_log(file, page_bytes)
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(key, *row) for key, row in rows.items()])
    connection.execute("COMMIT")
    assert read_by_pages(file) == rows, "from the log"
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert read_by_pages(file) == rows, "from the file"
    connection.close()


def test_a_log_counts_up_to_where_sqlite_reads_it(tmp_path):
    """Cut anywhere, or with a bit changed anywhere: the same transactions, also after a log that was begun anew."""
    choose, file = random.Random(3), tmp_path / "a.db"
    connection = with_log(file)
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(n, n, bytes(n * 40)) for n in range(60)])
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    for n in range(100, 130):
        connection.execute("INSERT INTO t VALUES (?, ?, ?)", (n, "new", bytes(n * 30)))
    main, log = file.read_bytes(), Path(f"{file}-wal").read_bytes()
    connection.close()
    seen = set()
    for number in range(80):
        copy = tmp_path / f"{number}.db"
        copy.write_bytes(main)
        changed = bytearray(log[: choose.randrange(len(log))] if number % 2 else log)
        if number % 4 == 0:
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
        Path(f"{copy}-wal").write_bytes(changed)
        found = read_by_pages(copy)
        assert found == read_by_sqlite(copy)
        seen.add(len(found))
    assert len(seen) > 10, "many different moments"


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=8).map(b"".join),
)
def test_a_checksum_is_sqlites(first, second, data):
    """The recurrence as its documentation has it."""
    for order, name in ((">u4", "big"), ("<u4", "little")):
        a, b = first, second
        for at in range(0, len(data), 8):
            a = (a + int.from_bytes(data[at : at + 4], name) + b) % 2**32
            b = (b + int.from_bytes(data[at + 4 : at + 8], name) + a) % 2**32
        assert checksum((first, second), data, order) == (a, b)


def test_rows_that_claim_the_same_pages_over_and_over_end(tmp_path):
    """A hostile page of many rows, each of which goes on in the same long chain, does not take forever to read."""
    file = tmp_path / "a.db"
    connection = with_log(file)
    connection.execute("INSERT INTO t VALUES (1, NULL, zeroblob(4000000))")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(file.read_bytes())
    (page,) = [n for n in range(0, len(content), 4096) if n and content[n] == 0x0D]
    pointer = content[page + 8 : page + 10]
    content[page + 3 : page + 5] = (1500).to_bytes(2, "big")
    content[page + 8 : page + 8 + 3000] = bytes(pointer) * 1500
    file.write_bytes(content)
    with file.open("rb") as opened:
        pages = Pages(opened, None)
        assert len([row for row in rows_on(page // 4096 + 1, pages) if len(row.values) == 3]) <= 4
