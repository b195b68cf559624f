"""A cache is looked at as SQLite sees it, log included; whatever else a file holds is refused and left as it was."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.snapshot.sealing import IndexFolder
from precedent.cache.store import database, files
from precedent.cache.store.connection import connect
from precedent.cache.store.files import half_made
from precedent.cache.store.inspection import RepairableError, inspecting
from precedent.cache.store.records import vector_checksum
from precedent.cache.store.schema import APPLICATION_ID, FORMATS
from precedent.errors import CacheError, CacheMismatchError
from precedent.testing.store_contract import EMBEDDER, completion, ids_of, unit_vector

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


def refused(file: Path, match: str, kind: type[CacheError] = CacheError) -> None:
    """By opening and by verifying, in one line; file, log and journal stay as they were."""
    before = contents(file)
    with pytest.raises(kind, match=match) as caught:
        SQLiteStore.open(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(CacheError), inspecting(file, whole=True):
        pass
    assert contents(file) == before


def tokens_in(file: Path) -> list[int]:
    store = SQLiteStore.open(file)
    found = sorted(one.token_ids[0] for one in store.list(Selection(), None))
    store.close()
    return found


# --- a log beside the file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_checkpoint_that_was_cut_short_costs_nothing(tmp_path, share):
    """The file has grown to a part of what its header says, the last page is torn, and the log is whole."""
    found = logged(tmp_path / "a")
    begin, end = len(found[""]), len(found["folded"])
    torn = found["folded"][: begin + int(share * (end - begin)) - int(share * 100)]
    file = write(tmp_path / "b", {"": torn, "-wal": found["-wal"]})
    before = contents(file)
    assert verify_cache(file).findings == ()
    with pytest.raises(CacheMismatchError, match="embedder"):
        SQLiteStore.open(file, embedder=OtherEmbedder())
    assert contents(file) == before, "a look folds nothing in"
    assert tokens_in(file) == [*range(COUNT), *range(100, 100 + COUNT)]


class OtherEmbedder:
    name, fingerprint, dimension = "other", "other", 3

    def embed(self, texts):
        raise AssertionError("nothing is embedded")


def test_looking_while_another_process_writes_believes_no_torn_state(tmp_path):
    """One process stores and folds its log in without a pause, while this one looks at the files again and again."""
    code = """
        import sys, threading
        from precedent.cache import Bounds, NewCompletion, SQLiteStore
        def opened():
            store = SQLiteStore.open(sys.argv[1], bounds=Bounds(max_records=60))
            store._database._writer.execute("PRAGMA wal_autocheckpoint=20")
            store._database._writer.execute("PRAGMA synchronous=OFF")
            return store
        store = opened()
        done = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
        number = 0
        while not done.is_set():
            number += 1
            store.insert(NewCompletion((number,), "tok", "model", text="x" * 20_000), None, None)
            if number % 50 == 0:
                store.close()
                store = opened()
            if number == 50:
                print("ready", flush=True)
        store.close()
        print(number)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        for _ in range(40):
            with inspecting(tmp_path / "precedent.sqlite", whole=True) as connection:
                assert 50 <= connection.execute("SELECT count(*) FROM completion").fetchone()[0] <= 60
        written = int(writer.communicate("")[0])
    assert tokens_in(tmp_path / "precedent.sqlite")[-1] == written


@pytest.mark.parametrize("left", [b"", b"\x00"], ids=["no byte", "one byte"])
def test_sqlite_never_sees_an_empty_file_beside_its_log(tmp_path, left):
    """It would take the file for new and delete the log, which holds everything."""
    found = logged(tmp_path / "a")
    file = write(tmp_path / "b", {"": left, "-wal": found["-wal"]})
    refused(file, "it is empty and its log is not", RepairableError)
    assert verify_cache(file).findings[0].kind == "structure"
    assert contents(file)["-wal"] == found["-wal"]


def test_a_file_that_lost_more_than_its_log_holds_is_refused(tmp_path):
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    found = contents(file)
    store.close()
    file = write(tmp_path / "b", {"": found[""][: 5 * PAGE], "-wal": found["-wal"]})
    refused(file, "pages are missing at its end, more than its log can hold", RepairableError)


def test_records_behind_damage_in_the_log_are_found_missing(tmp_path):
    """SQLite reads a log up to its first damaged frame. With two transactions behind it, one was acknowledged."""
    found = logged(tmp_path / "a")
    log = bytearray(found["-wal"])
    log[len(log) // 2] ^= 1
    file = write(tmp_path / "b", {"": found[""], "-wal": bytes(log)})
    before = contents(file)
    (finding,) = verify_cache(file).findings
    assert "there are records after the damage" in finding.detail
    assert contents(file) == before
    assert verify_cache(file, repair=True).sound
    saved = tokens_in(file)
    assert set(range(COUNT)) < set(saved)
    assert len(saved) >= 2 * COUNT - 3, "all but what stood on the damaged page"


def test_the_torn_end_of_a_log_is_no_damage(tmp_path):
    """A transaction that a power cut tore was never acknowledged: its last frame may be on disk without its first."""
    found = logged(tmp_path / "a")
    log = bytearray(found["-wal"])
    frames = (len(log) - 32) // (PAGE + 24)
    ends = [n for n in range(frames) if any(log[32 + n * (PAGE + 24) + 4 : 32 + n * (PAGE + 24) + 8])]
    begin = 32 + (ends[-2] + 1) * (PAGE + 24)
    assert ends[-1] > ends[-2] + 1, "the last transaction has several frames"
    log[begin + 200] ^= 1
    file = write(tmp_path / "b", {"": found[""], "-wal": bytes(log)})
    assert verify_cache(file).findings == ()
    assert len(tokens_in(file)) == 2 * COUNT - 1


def test_a_log_that_cannot_be_read_here_is_not_left_out_silently(tmp_path):
    """SQLite needs an index beside the log and may not make one; without the log half of the records would be gone."""
    found = logged(tmp_path / "a")
    file = write(tmp_path / "b", found)
    Path(f"{file}-shm").symlink_to(tmp_path / "nowhere" / "else")
    refused(file, "cannot be inspected now: unable to open database file; .* make it writable")


@pytest.mark.parametrize("journal", ["hot", "hot, and a log"])
def test_what_another_program_would_roll_back_is_refused(tmp_path, journal):
    """SQLite rolls a journal into the file it lies beside, whosever it is."""
    other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    other.execute("CREATE TABLE t (x)")
    other.executemany("INSERT INTO t VALUES (?)", [("x" * 3000,) for _ in range(50)])
    other.execute("PRAGMA cache_size=2")
    other.execute("BEGIN")
    other.execute("UPDATE t SET x = upper(x)")
    planted = (tmp_path / "other.db-journal").read_bytes()
    other.execute("ROLLBACK")
    other.close()
    found = logged(tmp_path / "a")
    if journal == "hot":
        found = {"": found["folded"]}
    file = write(tmp_path / "b", {**found, "-journal": planted})
    refused(file, "precedent.sqlite-journal would be rolled back into it", RepairableError)
    assert verify_cache(file, repair=True).sound
    assert len(tokens_in(file)) == 2 * COUNT
    assert Path(f"{file}.damaged-journal").read_bytes() == planted


def test_a_file_that_another_program_switched_writes_a_log_again(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA journal_mode=DELETE")
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    assert Path(f"{file}-wal").stat().st_size > 0
    store.close()


# --- schemas that are not ours ---------------------------------------------------------------------------------------

PLANTED = {
    "trigger 'planted' does not belong to": "CREATE TRIGGER planted AFTER INSERT ON completion BEGIN "
    "DELETE FROM completion WHERE id = new.id; END",
    "view 'planted' does not belong to": "CREATE VIEW planted AS SELECT * FROM completion",
    "table 'planted' does not belong to": "CREATE TABLE planted (x)",
    "index 'planted' does not belong to": "CREATE INDEX planted ON completion (abs(accepted - 9223372036854775807))",
    "index 'completion_identity' is missing": "DROP INDEX completion_identity",
    "trigger 'completion_went' is missing": "DROP TRIGGER completion_went",
    "table 'gone' is missing": "DROP TABLE gone",
    "table 'completion' differs from a cache's": "ALTER TABLE completion ADD COLUMN more TEXT DEFAULT 'x'",
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_schema_that_is_not_ours_is_refused_and_can_be_repaired(tmp_path, said):
    """With the first of them, `insert` would return the id of a record that is not there."""
    file = filled(tmp_path)
    changed(file, PLANTED[said])
    refused(file, re.escape(said), RepairableError)
    (finding,) = verify_cache(file).findings
    assert said in finding.detail
    assert verify_cache(file, repair=True).sound
    assert tokens_in(file) == list(range(COUNT))
    store = SQLiteStore.open(file)
    row_id = store.insert(completion(999), unit_vector(1), EMBEDDER)
    assert ids_of(store.list(Selection(ids=(row_id,)))) == [row_id]
    store.close()


def test_what_is_checked_is_every_object_of_every_format(tmp_path):
    """Each object left out of each format's schema in turn, and each one's statement changed: all are refused."""
    for number, script in FORMATS:
        names = sqlite3.connect(":memory:")
        names.executescript(script)
        objects = names.execute("SELECT type, name FROM sqlite_master WHERE sql NOT NULL AND name NOT LIKE 'sqlite%'")
        for kind, name in objects.fetchall():
            file = tmp_path / f"{number} {len(script)} {name}" / "precedent.sqlite"
            file.parent.mkdir()
            marks = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={number}"
            made = sqlite3.connect(file, isolation_level=None)
            made.executescript(f"{marks}; {script}")
            made.close()
            with inspecting(file):
                pass
            changed(file, f"DROP {kind} {name}")
            refused(file, "is missing|differs from a cache's|no such table", RepairableError)


def test_a_number_that_does_not_fit_the_tables_is_said(tmp_path):
    file = filled(tmp_path / "a")
    changed(file, "PRAGMA user_version=1")
    refused(file, "its header says format 1, and its tables have format 2", CacheMismatchError)
    assert verify_cache(file, repair=True).sound
    assert tokens_in(file) == list(range(COUNT))


def test_a_newer_number_asks_for_an_upgrade_first(tmp_path):
    """With tables of today it may also be damage, and is repaired when that is asked for; with others it never is."""
    file = filled(tmp_path / "a")
    changed(file, "PRAGMA user_version=999")
    refused(file, "format 999.*reads 1 to 2.*upgrade precedent.*its tables have format 2", CacheMismatchError)
    assert verify_cache(file, repair=True).sound
    newer = filled(tmp_path / "b")
    changed(newer, "PRAGMA user_version=999", "CREATE TABLE of_the_future (x)")
    before = contents(newer)
    for repair in (False, True):
        with pytest.raises(CacheMismatchError, match=r"upgrade precedent or give another path$"):
            verify_cache(newer, repair=repair)
    assert contents(newer) == before


def test_another_programs_mark_on_our_tables_is_said(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA application_id=7")
    refused(file, "some other file.*it has a cache's tables, and another program's mark 7", CacheMismatchError)
    assert verify_cache(file, repair=True).sound


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta",
        "UPDATE meta SET value = 'x' WHERE key = 'epoch'",
        "DELETE FROM sqlite_sequence",
        "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    ],
)
def test_rows_that_every_cache_has_are_looked_for(tmp_path, statement):
    file = filled(tmp_path)
    changed(file, statement)
    refused(file, "has no epoch|number of the last record", RepairableError)
    assert verify_cache(file, repair=True).sound
    assert tokens_in(file) == list(range(COUNT))


def test_a_meta_row_that_goes_while_the_cache_is_open_is_a_clear_error(tmp_path):
    store = SQLiteStore.open(filled(tmp_path))
    changed(tmp_path / "precedent.sqlite", "DELETE FROM meta")
    for ask in (store.epoch, lambda: store.gone_since(0), lambda: store.insert(completion(999), None, None)):
        with pytest.raises(CacheError, match="has no epoch"):
            ask()
    store.close()


@pytest.mark.parametrize("path", [None, "a.db"])
def test_no_connection_trusts_what_a_schema_calls(tmp_path, path):
    file = None if path is None else tmp_path / path
    if file is not None:
        file.touch()
    connection = connect(file)
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
    connection.close()


def test_a_header_with_which_sqlite_would_not_write_is_found(tmp_path):
    """Its format's number for writers is one that no SQLite writes: the cache would be read-only for ever."""
    file = filled(tmp_path)
    for at, value in ((18, 9), (59, 4)):
        content = bytearray(file.read_bytes())
        content[at] = value
        file.write_bytes(content)
        assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]
        assert verify_cache(file, repair=True).sound
        assert tokens_in(file) == list(range(COUNT))


def test_verifying_an_open_cache_keeps_its_locks(tmp_path):
    """The header is not read through a descriptor whose closing would let another process take the cache for unused."""
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    assert store.verify().sound
    code = f"""
        import sqlite3
        connection = sqlite3.connect({str(file)!r}, isolation_level=None)
        connection.execute("SELECT count(*) FROM completion").fetchone()
        connection.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert Path(f"{file}-wal").stat().st_size > 0, "the last one to close it would have folded the log in"
    store.close()


# --- damage that passes a look ---------------------------------------------------------------------------------------


def test_an_index_cannot_show_one_tenants_record_to_another(tmp_path):
    """Opening does not compare indexes with their table; records say themselves whose they are."""
    file = tmp_path / "precedent.sqlite"
    store = SQLiteStore.open(file)
    fill(store, tenant="shop-a")
    store.close()
    connection = sqlite3.connect(file)
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE type = 'index'").fetchall())
    connection.close()
    content = bytearray(file.read_bytes())
    for name in ("completion_partition", "completion_identity"):
        page = slice((roots[name] - 1) * PAGE, roots[name] * PAGE)
        content[page] = content[page].replace(b"shop-a", b"shop-b")
    file.write_bytes(content)
    store = SQLiteStore.open(file)
    assert all(one.tenant == "shop-b" for one in store.since("shop-b", "tok", 0))
    assert store.since("shop-b", "tok", 0) == []
    with pytest.raises(CacheError, match=r"names record \d+ wrongly|malformed"):
        store.insert(completion(3, 4, tenant="shop-b", text="text 3 " * 200), None, None)
    store.close()
    assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]
    assert verify_cache(file, repair=True).sound
    store = SQLiteStore.open(file)
    assert len(store.since("shop-a", "tok", 0)) == COUNT
    store.close()


def test_storing_what_is_there_but_damaged_stores_it_anew(tmp_path):
    """Its row is found by its identity and served to nobody: counting it once more would store nothing."""
    file = filled(tmp_path)
    changed(file, "UPDATE completion SET text = 'other' WHERE id = 5")
    store = SQLiteStore.open(file)
    assert 5 not in ids_of(store.since("default", "tok", 0))
    row_id = store.insert(completion(4, 5, text="text 4 " * 200), unit_vector(4), EMBEDDER)
    assert row_id == COUNT + 1
    assert store.list(Selection(ids=(row_id,)))[0].token_ids == (4, 5)
    store.close()
    assert verify_cache(file).findings == ()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *[(name, f"CAST({name} AS BLOB)") for name in ("query", "text", "model", "tools", "tenant", "tokenizer")],
        *[
            (name, value)
            for name in ("count", "hits", "accepted", "rejected")
            for value in ("'x'", "-1", "x'00'", "0.5")
        ],
        *[("created", value) for value in ("'x'", "1e300", "-1e300", "x'00'")],
        ("count", "0"),
    ],
)
def test_a_value_of_another_kind_is_damage_though_the_checksum_holds(tmp_path, column, value):
    file = filled(tmp_path)
    changed(file, f"UPDATE completion SET {column} = {value} WHERE id = 5")
    store = SQLiteStore.open(file)
    assert 5 not in ids_of(store.list(Selection(), None))
    assert len(store.list(Selection(), None)) == COUNT - 1
    assert store.stats().records == COUNT
    store.partition("default", "tok").directory()
    store.close()
    assert {finding.kind for finding in verify_cache(file, repair=True).findings} <= {"record", "sums"}
    assert tokens_in(file) == [n for n in range(COUNT) if n != 4]


@pytest.mark.parametrize(
    "value", ['{"name": 1, "fingerprint": "x", "dimension": 4}', "[" * 100_000, '{"name": "x"}', "7"]
)
def test_a_damaged_embedder_is_a_clear_error(tmp_path, value):
    file = filled(tmp_path)
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'embedder'", (value,))
    connection.close()
    with pytest.raises(CacheError, match="record of its embedder is damaged"):
        SQLiteStore.open(file)


def test_vectors_of_another_dimension_are_left_out(tmp_path):
    """As after a log of another cache: each vector is whole, and together they are none."""
    file = filled(tmp_path)
    longer = unit_vector(1).tobytes() * 2
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(
        "UPDATE completion SET vector = ?, vector_checksum = ? WHERE id = 5", (longer, vector_checksum(longer))
    )
    connection.close()
    store = SQLiteStore.open(file)
    ids, vectors = store.vectors_since("default", "tok", 0)
    assert vectors.shape == (COUNT - 1, 4)
    assert 5 not in ids
    store.close()


# --- what killed processes leave -------------------------------------------------------------------------------------


def test_what_a_killed_creation_left_is_swept_up(tmp_path):
    """Also what earlier versions left, which made the file beside the cache."""
    for name in (".precedent-abc.new", ".precedent-abc.new-journal", ".precedent-x1.new-wal"):
        (tmp_path / name).write_bytes(b"half")
    dead = tmp_path / ".precedent-dead.new"
    dead.mkdir()
    (dead / "precedent.sqlite").write_bytes(b"half")
    (tmp_path / ".precedent-notes").write_text("mine")
    SQLiteStore.open(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"precedent.sqlite", ".precedent-notes"}


def test_a_living_creation_is_left_alone(tmp_path):
    """In this process and in another one."""
    code = """
        import sys
        from pathlib import Path
        from precedent.cache.store.files import half_made
        with half_made(Path(sys.argv[1])) as new:
            print(new.parent.name, flush=True)
            sys.stdin.read()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = tmp_path / other.stdout.readline().strip()
        with half_made(tmp_path) as mine:
            SQLiteStore.open(tmp_path).close()
            assert mine.exists()
            assert theirs.is_dir()
        other.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["precedent.sqlite"]


def test_a_creation_that_is_swept_up_before_it_is_locked_begins_again(tmp_path, monkeypatch):
    locked, swept = files.locked, []

    def late(path, *, wait):
        if not swept:
            swept.append(path)
            path.rmdir()
        return locked(path, wait=wait) if path.exists() else None

    monkeypatch.setattr(files, "locked", late)
    SQLiteStore.open(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["precedent.sqlite"]
    assert len(swept) == 1


def test_files_of_a_seal_in_progress_are_not_swept_up(tmp_path):
    """Opening meanwhile leaves them; when the process that seals is dead, opening erases them."""
    index, sealing, end = IndexFolder(filled(tmp_path)), threading.Event(), threading.Event()
    folder = index.path / "aa"

    def seal() -> None:
        with index.alone() as alone:
            assert alone
            folder.mkdir()
            (folder / ".x.new").write_bytes(b"tokens")
            (folder / "7.tokens.npy").write_bytes(b"tokens")
            sealing.set()
            end.wait()

    thread = threading.Thread(target=seal)
    thread.start()
    sealing.wait()
    SQLiteStore.open(tmp_path).close()
    assert len(list(folder.iterdir())) == 2
    end.set()
    thread.join()
    (index.path / "writing").touch()  # as a killed process leaves it
    SQLiteStore.open(tmp_path).close()
    assert not folder.exists()
    assert not (index.path / "writing").exists()


def test_opening_the_file_that_a_repair_has_just_replaced_opens_the_new_one(tmp_path, monkeypatch):
    """Between finding the file and reading from it: what is written to the old one would go into the new one's log."""
    file, other = filled(tmp_path / "a"), filled(tmp_path / "b", range(5))
    connections = []

    def swapped(path, mode="mode=rw"):
        connections.append(connect(path, mode))
        if len(connections) == 1:
            path.rename(f"{path}.damaged")
            other.rename(path)
        return connections[-1]

    monkeypatch.setattr(database, "connect", swapped)
    store = SQLiteStore.open(file)
    assert len(store.list(Selection(), None)) == 5
    store.insert(completion(77), None, None)
    store.close()
    assert tokens_in(file) == [0, 1, 2, 3, 4, 77]
