"""A file that cannot be read is set aside with its log; a damaged record is found, left out and never served."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.cache_files import COUNT, PAGE, changed, contents, fill, filled, tokens_in, write
from helpers.forked import Program

from precedent.cache import Selection, SpeculationCache, SQLiteStore, inspection, verify_cache
from precedent.cache.database import connect
from precedent.cache.records import vector_checksum
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import EMBEDDER, completion, ids_of, unit_vector


def broken(file: Path) -> Path:
    """One page in the middle is overwritten."""
    content = bytearray(file.read_bytes())
    content[2 * PAGE : 3 * PAGE] = b"\xff" * PAGE
    file.write_bytes(content)
    return file


def kept(file: Path, number: int = 1) -> Path:
    return file.with_name(f"{file.name}.damaged" + ("" if number == 1 else f"-{number}"))


# --- set aside -------------------------------------------------------------------------------------------------------


def test_one_warning_names_the_file_the_reason_and_what_recovers_it(tmp_path, caplog):
    file = broken(filled(tmp_path))
    before = file.read_bytes()
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        assert cache.stats().records == 0
        assert cache.insert(completion(1)) == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{file} cannot be read" in warning
    assert f"sqlite3 {kept(file)} .recover" in warning
    assert kept(file).read_bytes() == before
    caplog.clear()
    assert tokens_in(file) == [1]
    assert caplog.records == []


def test_every_file_that_was_set_aside_is_kept(tmp_path):
    file = broken(filled(tmp_path))
    first = file.read_bytes()
    assert tokens_in(file) == []
    fill(store := SQLiteStore.open(file), range(50, 80))
    store.close()
    second = broken(file).read_bytes()
    assert tokens_in(file) == []
    assert (kept(file).read_bytes(), kept(file, 2).read_bytes()) == (first, second)


def test_a_file_whose_header_is_gone_is_ours_by_the_name_that_precedent_gave_it(tmp_path):
    file = filled(tmp_path)
    file.write_bytes(b"\xff" * PAGE + file.read_bytes()[PAGE:])
    other = shutil.copy(file, tmp_path / "mine.db")
    before = other.read_bytes()
    assert tokens_in(file) == []
    with pytest.raises(CacheError, match="is not a cache"):
        SQLiteStore.open(other)
    assert other.read_bytes() == before


def test_a_read_only_cache_is_refused_and_left_as_it_is(tmp_path):
    file = broken(filled(tmp_path))
    before = contents(file)
    for options in ({"read_only": True}, {"create": False}):
        with pytest.raises(CacheError, match=r"is damaged .*sqlite3 .* \.recover"):
            SQLiteStore.open(file, **options)
    assert contents(file) == before
    assert not kept(file).exists()


def test_a_file_that_this_process_has_open_is_left_in_place(tmp_path):
    file = filled(tmp_path)
    with closing(SQLiteStore.open(file)):
        broken(file)
        with pytest.raises(CacheError, match="this process has it open"):
            SQLiteStore.open(file)
    assert not kept(file).exists()


def test_a_file_that_another_process_has_open_is_left_in_place(tmp_path, nobody_waits_long):
    """Its last user deletes the log by its name when it closes: that would be the new cache's log."""
    file = filled(tmp_path)
    code = """
        import sys
        from precedent.cache import Selection, SQLiteStore
        store = SQLiteStore.open(sys.argv[1])
        store.list(Selection(), None)
        print("ready", flush=True)
        sys.stdin.read()
        store.close()
    """
    with Program(["-c", dedent(code), file]) as other:
        assert other.stdout.readline() == "ready\n"
        changed(file, "DELETE FROM meta WHERE key = 'epoch'")
        with pytest.raises(CacheError, match="another process has it open"):
            SQLiteStore.open(file)
        assert not kept(file).exists()
    assert tokens_in(file) == []
    assert kept(file).exists()


def test_processes_that_open_a_damaged_file_at_once_set_it_aside_once(tmp_path):
    """All of them then share the new file."""
    file = broken(filled(tmp_path))
    code = """
        import sys
        from precedent.cache import Completion, SQLiteStore
        from precedent.errors import CacheError
        sys.stdin.readline()
        for _ in range(50):
            try:
                store = SQLiteStore.open(sys.argv[1])
                break
            except CacheError as error:
                assert any(words in str(error) for words in ("open it again", "has it open", "no cache at")), error
        store.insert(Completion((int(sys.argv[2]),), "tok", "model"), None, None)
        store.close()
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(Program(["-c", dedent(code), file, number])) for number in range(3)]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait() for process in processes] == [0, 0, 0]
    assert tokens_in(file) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir() if ".damaged" in path.name] == [kept(file).name]


def test_looking_at_a_file_that_another_process_has_just_set_aside_leaves_none_in_its_place(tmp_path, monkeypatch):
    """An empty one would pass for a damaged cache, and the new cache would be set aside too."""
    file = filled(tmp_path)

    def connect_late(path, *mode):
        path.rename(kept(path))
        return connect(path, *mode)

    monkeypatch.setattr(inspection, "connect", connect_late)
    with pytest.raises(CacheError):
        SQLiteStore.open(file, create=False)
    assert kept(file).exists()
    assert not file.exists()


# --- damaged structure -----------------------------------------------------------------------------------------------


def overwritten(file: Path, changes) -> None:
    """Change the root pages of some indexes."""
    connection = sqlite3.connect(file)
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE type = 'index'").fetchall())
    connection.close()
    content = bytearray(file.read_bytes())
    for name, change in changes.items():
        page = slice((roots[name] - 1) * PAGE, roots[name] * PAGE)
        content[page] = change(content[page])
    file.write_bytes(content)


def test_an_index_cannot_show_one_tenants_record_to_another(tmp_path):
    """Opening does not compare indexes with their table; records say themselves whose they are."""
    file = tmp_path / "precedent.sqlite"
    store = SQLiteStore.open(file)
    fill(store, tenant="shop-a")
    store.close()
    names = ("completion_partition", "completion_identity")
    overwritten(file, dict.fromkeys(names, lambda page: page.replace(b"shop-a", b"shop-b")))
    store = SQLiteStore.open(file)
    assert store.since("shop-b", "tok", 0) == []
    with pytest.raises(CacheError, match=r"names record \d+ wrongly|malformed"):
        store.insert(completion(3, 4, tenant="shop-b", text="text 3 " * 200), None, None)
    store.close()
    assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]


# --- damaged records -------------------------------------------------------------------------------------------------


def test_damaged_records_and_vectors_are_found_and_can_be_forgotten(tmp_path):
    """Verifying changes nothing."""
    file = filled(tmp_path)
    assert verify_cache(tmp_path).sound
    changed(
        file,
        "UPDATE completion SET token_ids = zeroblob(8) WHERE id = 7",
        "UPDATE completion SET text = 'other' WHERE id = 9",
        "UPDATE completion SET vector = zeroblob(16) WHERE id = 11",
        "UPDATE completion SET vector = NULL WHERE id = 12",
    )
    before = file.read_bytes()
    report = verify_cache(file)
    found = [(finding.kind, *finding.ids) for finding in report.findings]
    assert found == [("record", 7), ("record", 9), ("vector", 11), ("vector", 12)]
    assert (report.records, report.sound) == (COUNT - 2, False)
    assert file.read_bytes() == before
    store = SQLiteStore.open(file)
    assert ids_of(store.since("default", "tok", 0)) == [n for n in range(1, COUNT + 1) if n not in (7, 9)]
    ids, vectors = store.vectors_since("default", "tok", 0)
    assert ids.tolist() == [n for n in range(1, COUNT + 1) if n not in (11, 12)]
    assert all((vector == unit_vector(row_id - 1)).all() for row_id, vector in zip(ids, vectors, strict=True))
    assert store.forget(Selection(ids=(7, 9, 11, 12))) == 4
    store.close()
    assert verify_cache(file).findings == ()


def test_storing_what_is_there_but_damaged_stores_it_anew(tmp_path):
    """Its row is found by its identity and served to nobody: counting it once more would store nothing."""
    file = filled(tmp_path)
    changed(file, "UPDATE completion SET text = 'other' WHERE id = 5")
    store = SQLiteStore.open(file)
    row_id = store.insert(completion(4, 5, text="text 4 " * 200), unit_vector(4), EMBEDDER)
    assert row_id == COUNT + 1
    assert store.list(Selection(ids=(row_id,)))[0].token_ids == (4, 5)
    store.close()
    assert verify_cache(file).findings == ()


def test_a_meta_row_that_goes_while_the_cache_is_open_is_a_clear_error(tmp_path):
    store = SQLiteStore.open(filled(tmp_path))
    changed(tmp_path / "precedent.sqlite", "DELETE FROM meta")
    with pytest.raises(CacheError, match="has no epoch"):
        store.epoch()
    store.close()


@pytest.mark.parametrize(
    "value", ['{"name": 1, "fingerprint": "x", "dimension": 4}', "[" * 100_000, '{"name": "x"}', "7"], ids=str.__len__
)
def test_a_damaged_record_of_the_embedder_is_found_and_the_file_set_aside(tmp_path, value):
    file = filled(tmp_path)
    changed(file, f"UPDATE meta SET value = '{value}' WHERE key = 'embedder'")
    (finding,) = verify_cache(file).findings
    assert (finding.kind, finding.detail) == ("structure", "the cache's record of its embedder is damaged")
    with pytest.raises(CacheError, match="record of its embedder is damaged"):
        SQLiteStore.open(file, create=False)
    assert tokens_in(file) == []
    assert kept(file).exists()


def test_a_file_that_lost_more_than_its_log_holds_is_damaged(tmp_path):
    file = filled(tmp_path / "a")
    with closing(SQLiteStore.open(file)) as store:
        fill(store, range(100, 101))
        found = contents(file)
    file = write(tmp_path / "b", {"": found[""][: 5 * PAGE], "-wal": found["-wal"]})
    with pytest.raises(CacheError, match="pages are missing at its end, more than its log can hold"):
        SQLiteStore.open(file, create=False)
    assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]


def test_an_index_that_disagrees_with_its_table_is_found(tmp_path):
    file = filled(tmp_path)
    overwritten(file, {"completion_worth": lambda page: b"\xa5" * PAGE})
    assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]


def test_a_flipped_bit_in_a_record_leaves_out_that_record_alone(tmp_path, caplog):
    file = filled(tmp_path)
    content = bytearray(file.read_bytes())
    content[content.find(unit_vector(7).tobytes())] ^= 1
    content[content.find(b"query (9, 10)")] ^= 0x80  # no longer UTF-8
    file.write_bytes(content)
    store = SQLiteStore.open(file)
    for _ in range(2):
        assert [one.token_ids[0] for one in store.since("default", "tok", 0)] == [n for n in range(COUNT) if n != 9]
        assert store.vectors_since("default", "tok", 0)[0].tolist() == [n + 1 for n in range(COUNT) if n != 7]
        assert store.list(Selection(containing="no such text"), None) == []
        assert caplog.text.count("is damaged") == 2, "each is said once"
    assert store.forget(Selection(ids=(10, 8))) == 2
    store.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *[(name, f"CAST({name} AS BLOB)") for name in ("query", "tools", "tenant", "tokenizer")],
        *[(name, value) for name in ("count", "rejected") for value in ("'x'", "-1", "x'00'", "0.5")],
        *[("created", value) for value in ("'x'", "1e300", "-1e300", "x'00'")],
        ("count", "0"),
    ],
)
def test_a_value_of_another_kind_is_damage_though_the_checksum_holds(tmp_path, column, value):
    file = filled(tmp_path)
    changed(file, f"UPDATE completion SET {column} = {value} WHERE id = 5")
    store = SQLiteStore.open(file)
    assert sorted(ids_of(store.list(Selection(), None))) == [n for n in range(1, COUNT + 1) if n != 5]
    assert store.stats().records == COUNT
    store.close()
    report = verify_cache(file)
    assert [(finding.kind, finding.ids) for finding in report.findings] == [("record", (5,))]
    assert report.records == COUNT - 1


def test_vectors_of_another_dimension_are_left_out(tmp_path):
    """As after a log of another cache: each vector is whole, and together they are none."""
    file = filled(tmp_path)
    longer = unit_vector(1).tobytes() * 2
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        change = "UPDATE completion SET vector = ?, vector_checksum = ? WHERE id = 5"
        connection.execute(change, (longer, vector_checksum(longer)))
    store = SQLiteStore.open(file)
    ids, vectors = store.vectors_since("default", "tok", 0)
    assert vectors.shape == (COUNT - 1, 4)
    assert 5 not in ids
    store.close()
