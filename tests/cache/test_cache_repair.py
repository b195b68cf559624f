"""A repair saves what can be read and believes nothing else."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from helpers.cache_files import PAGE, changed
from helpers.repairs import COUNT, fill, filled, kept, logged, names_in, repaired

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.store.inspection import inspecting
from precedent.errors import CacheError
from precedent.testing.store_contract import EMBEDDER, completion, ids_of, unit_vector


def test_what_is_left_of_a_truncated_file_is_saved(tmp_path):
    """Cut at twelve places: the more is left, the more is saved; the damaged file stays beside it."""
    content, saved = filled(tmp_path / "whole").read_bytes(), []
    for share in range(1, 13):
        file = tmp_path / str(share) / "precedent.sqlite"
        file.parent.mkdir()
        file.write_bytes(content[: len(content) * share // 13])
        before = file.read_bytes()
        assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]
        saved.append(len(repaired(file)))
        assert kept(file).read_bytes() == before
    assert saved == sorted(saved)
    assert saved[-1] > COUNT // 2


@pytest.mark.parametrize("left", [0, 1, 700, PAGE, 3 * PAGE])
def test_the_log_of_a_truncated_file_is_saved(tmp_path, left):
    """Even of a file without a byte: SQLite would delete that log."""
    main, log = logged(tmp_path / "a")
    file = tmp_path / "b" / "precedent.sqlite"
    file.parent.mkdir()
    file.write_bytes(main[:left])
    Path(f"{file}-wal").write_bytes(log)
    assert set(range(100, 100 + COUNT)) <= set(repaired(file))
    assert Path(f"{kept(file)}-wal").read_bytes() == log


def test_nothing_but_an_empty_file_becomes_an_empty_cache(tmp_path):
    file = tmp_path / "precedent.sqlite"
    file.touch()
    with pytest.raises(CacheError, match=r"is not a cache.*empty"):
        verify_cache(file)
    assert repaired(file) == []
    for content, log in ((b"\x00", b""), (b"", b"notes of mine"), (b"mine", b""), (bytes(20_000), b"")):
        other = tmp_path / "other.db"
        other.write_bytes(content)
        Path(f"{other}-wal").write_bytes(log)
        with pytest.raises(CacheError, match=r"is not a cache|is damaged"):
            verify_cache(other, repair=True)
        assert (other.read_bytes(), Path(f"{other}-wal").read_bytes()) == (content, log)
    assert names_in(tmp_path) == {"precedent.sqlite", "precedent.sqlite.damaged", "other.db"}


def test_another_programs_database_is_never_repaired(tmp_path):
    """Whole, cut short, with its log, with its mark lost: no record of ours is in it."""
    source = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    source.execute("PRAGMA journal_mode=WAL")
    source.execute("CREATE TABLE completion (id INTEGER PRIMARY KEY, tenant TEXT)")
    source.executemany("INSERT INTO completion (tenant) VALUES (?)", [("x" * 300,) for _ in range(200)])
    log = (tmp_path / "a.db-wal").read_bytes()
    source.close()
    content = (tmp_path / "a.db").read_bytes()
    for number, (main, beside) in enumerate(
        [(content, None), (content[: PAGE * 2], None), (content[:PAGE], log), (bytes(PAGE) + content[PAGE:], None)]
    ):
        file = tmp_path / f"{number}.db"
        file.write_bytes(main)
        if beside is not None:
            Path(f"{file}-wal").write_bytes(beside)
        with pytest.raises(CacheError, match=r"is not a cache"):
            verify_cache(file, repair=True)
        assert file.read_bytes() == main
        assert not kept(file).exists()


@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_a_lost_page_costs_no_more_than_its_records(tmp_path, page):
    """The first one holds the file's header and its schema, the next ones the roots of its tables."""
    file = filled(tmp_path)
    content = file.read_bytes()
    lost = content[page * PAGE : (page + 1) * PAGE]
    file.write_bytes(content[: page * PAGE] + bytes(PAGE) + content[(page + 1) * PAGE :])
    assert repaired(file) == list(range(COUNT))
    store = SQLiteStore.open(file)
    assert (store.embedder() is None) == (b'"fingerprint"' in lost)
    store.close()


def test_a_file_without_its_meta_table_keeps_its_records_but_not_its_vectors(tmp_path):
    """Nobody knows then whose vectors they are."""
    file = filled(tmp_path)
    changed(file, "DELETE FROM meta")
    assert verify_cache(file, repair=True).sound
    store = SQLiteStore.open(file)
    assert len(store.since("default", "tok", 0)) == COUNT
    assert store.vectors_since("default", "tok", 0)[0].size == 0
    assert store.embedder() is None
    assert store.insert(completion(999), unit_vector(1), EMBEDDER) == COUNT + 1
    store.close()


def test_the_log_of_another_program_is_set_aside(tmp_path):
    main, _ = logged(tmp_path / "a")
    other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("CREATE TABLE notes (note)")
    other.executemany("INSERT INTO notes VALUES (?)", [("mine" * 500,) for _ in range(300)])
    log = (tmp_path / "other.db-wal").read_bytes()
    other.close()
    file = tmp_path / "b" / "precedent.sqlite"
    file.parent.mkdir()
    file.write_bytes(main)
    Path(f"{file}-wal").write_bytes(log)
    with pytest.raises(CacheError, match="its log is another program's"):
        SQLiteStore.open(file)
    assert repaired(file) == list(range(COUNT))
    assert Path(f"{kept(file)}-wal").read_bytes() == log


def test_what_went_is_not_brought_back(tmp_path):
    """Old versions of pages may lie behind the end of the file; what the cache has listed as gone stays gone."""
    file = filled(tmp_path)
    old = file.read_bytes()
    store = SQLiteStore.open(file)
    store._database._writer.execute("DELETE FROM completion WHERE id IN (5, 6, 7)")
    store.close()
    file.write_bytes(file.read_bytes() + old)
    changed(file, "DROP TRIGGER completion_went")
    assert b"text 5 text 5" in file.read_bytes()
    assert repaired(file) == [n for n in range(COUNT) if n not in (4, 5, 6)]
    assert b"text 5 text 5" not in file.read_bytes()
    store = SQLiteStore.open(file)
    assert store.epoch() > 3
    assert store.insert(completion(999), unit_vector(1), EMBEDDER) == COUNT + 1, "no number is given twice"
    store.close()


def test_a_number_that_went_is_not_given_again(tmp_path):
    """Also when the newest records are gone and everything else is lost."""
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    store._database._writer.execute("DELETE FROM completion WHERE id > 5")
    store.close()
    changed(file, "DELETE FROM sqlite_sequence")
    assert repaired(file) == [0, 1, 2, 3, 4]
    store = SQLiteStore.open(file)
    assert store.insert(completion(999), unit_vector(1), EMBEDDER) == COUNT + 1
    store.close()


def test_counts_and_times_are_saved(tmp_path):
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    store.credit({3: (7, 2)})
    before = store.list(Selection(), None)
    store.close()
    changed(file, "CREATE TABLE planted (x)")
    repaired(file)
    store = SQLiteStore.open(file)
    assert store.list(Selection(), None) == before
    assert store.stats().tenants[0].accepted == 7
    store.close()


def test_random_damage_never_costs_more_records_than_pages(tmp_path):
    """Some pages are overwritten with noise, 25 times over: every record that was on others is there."""
    choose, whole = random.Random(5), filled(tmp_path / "whole")
    content = whole.read_bytes()
    pages = len(content) // PAGE
    for number in range(25):
        lost = choose.sample(range(pages), choose.choice((1, 2, 5)))
        damaged = bytearray(content)
        for page in lost:
            damaged[page * PAGE : (page + 1) * PAGE] = choose.randbytes(PAGE)
        file = tmp_path / str(number) / "precedent.sqlite"
        file.parent.mkdir()
        file.write_bytes(damaged)
        assert {n for n in range(COUNT) if not on_pages(content, n, lost)} <= set(repaired(file))


def on_pages(content: bytes, number: int, lost: list[int]) -> bool:
    """Whether some of a record's bytes stand on one of these pages."""
    places = [unit_vector(number).tobytes(), f"query ({number}, {number + 1})".encode(), f"text {number} ".encode()]
    spots = [at for needle in places for at in occurrences(content, needle)]
    return any(at // PAGE in lost or (at + 40) // PAGE in lost for at in spots)


def occurrences(content: bytes, needle: bytes) -> list[int]:
    found, at = [], content.find(needle)
    while at >= 0:
        found.append(at)
        at = content.find(needle, at + 1)
    return found


def test_segments_still_serve_what_was_saved(tmp_path):
    """They name records by id and checksum, both of which a repair leaves as they were."""
    from precedent.drafters.matching.token_index import sorted_segment

    store = SQLiteStore.open(tmp_path)
    fill(store, range(COUNT))
    held = {one.id: one.token_ids for one in store.since("default", "tok")}
    partition = store.partition("default", "tok")
    partition.seal(dict.fromkeys(held, 2), lambda ids: sorted_segment({i: held[i] for i in ids.tolist()}))
    store.close()
    file = tmp_path / "precedent.sqlite"
    changed(file, "CREATE TABLE planted (x)")
    repaired(file)
    store = SQLiteStore.open(file)
    partition = store.partition("default", "tok")
    (segment,) = partition.segments(partition.directory())
    assert sorted(segment.ids.tolist()) == ids_of(store.since("default", "tok"))
    store.close()


def test_a_file_of_the_first_format_is_saved_into_one_of_today(tmp_path):
    from precedent.cache.store.schema import APPLICATION_ID, FORMATS

    today, file = filled(tmp_path / "today"), tmp_path / "old.sqlite"
    for number, script in FORMATS:
        file.unlink(missing_ok=True)
        connection = sqlite3.connect(file, isolation_level=None)
        connection.executescript(f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={number}; {script}")
        connection.execute("ATTACH ? AS today", (str(today),))
        names = ", ".join(row[1] for row in connection.execute("PRAGMA main.table_info(completion)"))
        connection.execute(f"INSERT INTO completion ({names}) SELECT {names} FROM today.completion")
        connection.execute("INSERT INTO meta SELECT * FROM today.meta WHERE key = 'embedder'")
        connection.execute("DROP INDEX completion_identity")
        connection.close()
        shutil.rmtree(f"{file}-index", ignore_errors=True)
        assert repaired(file) == list(range(COUNT))
        with inspecting(file) as looked_at:
            assert looked_at.execute("PRAGMA user_version").fetchone() == (2,)
