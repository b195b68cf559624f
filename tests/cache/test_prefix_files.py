"""Kept prefixes as files: modes, bounds, age, half-written files, forgetting, and several processes on one folder."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.cache_commands import run
from helpers.forked import Program
from helpers.prefix_folders import aged, all_in, opened, written

from precedent.cache import Selection, SpeculationCache, SQLiteStore
from precedent.cache import prefixes as prefix_files
from precedent.cache.prefixes import ABANDONED, DEFAULT_MAX_AGE
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder

TENANTS = ("shop", "other")


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_and_folders_are_their_owners_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        file = written(opened(tmp_path))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]


def test_what_was_written_is_read_by_its_tenant_alone(tmp_path: Path) -> None:
    written(opened(tmp_path))
    files = opened(tmp_path)
    assert [files.read(tenant, "a") for tenant in TENANTS] == [b"content", None]
    assert [files.holds(tenant, "a") for tenant in TENANTS] == [True, False]
    assert "shop" not in "".join(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


# Bounds


def test_the_least_recently_used_goes_first_whoever_it_is(tmp_path: Path) -> None:
    files = opened(tmp_path, max_prefix_bytes=25)
    for age, (tenant, name) in enumerate([("shop", "a"), ("other", "b")]):
        aged(written(files, tenant, name, bytes(10)), 100 - age, unused=100 - age)
    assert files.read("shop", "a") is not None, "which is a use"
    written(files, "shop", "c", bytes(10))
    assert [files.holds(*one) for one in (("shop", "a"), ("other", "b"), ("shop", "c"))] == [True, False, True]
    assert sum(file.stat().st_size for file in files.path.glob("*/*")) == 20


@pytest.mark.parametrize(("max_age", "limit"), [(None, DEFAULT_MAX_AGE), (60.0, 60.0), (1e9, 1e9)])
def test_age_counts_from_the_writing_and_uses_do_not_renew_it(
    tmp_path: Path, max_age: float | None, limit: float
) -> None:
    files = opened(tmp_path, max_age=max_age)
    file = written(files)
    aged(file, limit - 30)
    assert files.read("shop", "a") == b"content"
    aged(file, limit + 30)
    assert files.read("shop", "a") is None
    assert not files.holds("shop", "a"), "so it is written again"
    assert file.exists()
    files.sweep()
    assert not file.exists()


# Half-written files


def test_what_a_killed_process_left_goes_after_a_while_and_is_forgotten_at_once(tmp_path: Path) -> None:
    files = opened(tmp_path)
    left = written(files).with_name(".precedent-abcdefgh.new")
    left.write_bytes(b"half")
    files.sweep()
    assert left.exists(), "another process may be writing it"
    aged(left, ABANDONED + 1)
    files.sweep()
    assert not left.exists()
    left.write_bytes(b"half")
    files.forget(Selection(tenant="shop"))
    assert all_in(files) == set()


# Stores


# Forgetting

BETWEEN = time.time() - 500
"""A time between the young and the old, however long after this line they are written."""


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection(tenant="shop"), {"other young", "other old"}),
        (Selection(before=BETWEEN), {"shop young", "other young"}),
        (Selection(tenant="other", before=BETWEEN), {"shop young", "shop old", "other young"}),
        (Selection(tenant="shop", containing="Elm Street"), {"other young", "other old"}),
        (Selection(containing="Elm Street"), set()),
        (Selection(ids=(1, 2)), {"shop young", "shop old", "other young", "other old"}),
        (Selection(tenant="shop", ids=(1,)), {"shop young", "shop old", "other young", "other old"}),
    ],
    ids=["tenant", "age", "tenant and age", "tenant and text", "text", "ids", "tenant and ids"],
)
def test_forget_erases_what_its_conditions_may_cover(tmp_path: Path, selection: Selection, left: set[str]) -> None:
    """A text cannot be looked for in keys and values, so all that could hold it goes; ids are of completions."""
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        files = cache.prefixes
        for tenant in TENANTS:
            aged(written(files, tenant, "young"), 0)
            aged(written(files, tenant, "old"), time.time() - BETWEEN + 500)
        chosen = {name: getattr(selection, name) for name in ("tenant", "before", "containing", "ids")}
        cache.forget(**chosen)
        held = {f"{tenant} {name}" for tenant in TENANTS for name in ("young", "old") if files.holds(tenant, name)}
    assert held == left


@pytest.mark.skipif(os.name != "posix", reason="an open file cannot be deleted there")
def test_what_is_forgotten_is_overwritten(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with written(files, content=b"secret").open("rb") as held:
        files.forget(Selection(tenant="shop"))
        assert held.read() == bytes(6)


@pytest.mark.parametrize("step", [0, -3600, 3600], ids=["a steady clock", "set back", "set forward"])
def test_what_was_copied_before_a_forget_is_not_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """By whichever cache, and whatever the wall clock does meanwhile."""
    with (
        SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache,
        SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as other,
    ):
        files = cache.prefixes
        generation, now = files.generation(), time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now + step * 10**9)
        monkeypatch.setattr(time, "time", lambda: now / 10**9 + step)
        other.forget(tenant="other")
        files.write("shop", "a", b"content", generation)
        assert all_in(files) == set()
        files.write("shop", "a", b"content", files.generation())
        assert len(all_in(files)) == 1


# Together


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_operations_serves_what_was_written_last_or_nothing(tmp_path: Path, seed: int) -> None:
    """Against a plain dictionary: nothing forgotten, discarded or of another tenant ever comes back."""
    chance, files, expected = random.Random(seed), opened(tmp_path), dict[tuple[str, str], bytes]()
    for _ in range(60):
        tenant, name, content = chance.choice(TENANTS), chance.choice("abc"), chance.randbytes(8)
        operation = chance.choice(["write", "write", "late write", "forget", "forget old", "discard", "open"])
        if operation == "write":
            written(files, tenant, name, content)
            expected[tenant, name] = content
        elif operation == "late write":
            files.write(tenant, name, content, files.generation() - 1)
        elif operation == "forget old":
            files.forget(Selection(before=time.time() - 100))
        elif operation == "discard":
            files.discard(tenant, name)
            expected.pop((tenant, name), None)
        elif operation == "open":
            files = opened(tmp_path)
        if operation in ("forget", "late write"):
            files.forget(Selection(tenant=tenant))
            expected = {key: kept for key, kept in expected.items() if key[0] != tenant}
        served = {(tenant, name): files.read(tenant, name) for tenant in TENANTS for name in "abc"}
        assert {key: read for key, read in served.items() if read is not None} == expected


def test_what_is_larger_than_the_bound_is_neither_written_nor_read(tmp_path: Path) -> None:
    """And costs nobody theirs; a file may have grown."""
    files = opened(tmp_path, max_prefix_bytes=25)
    grown = written(files)
    assert not written(files, name="b", content=bytes(26)).exists()
    assert files.read("shop", "a") == b"content"
    grown.write_bytes(bytes(26))
    assert files.read("shop", "a") is None


def test_an_application_that_opens_the_cache_removes_old_ones_and_a_command_does_not(tmp_path: Path) -> None:
    """A command does not know the bounds that the application sets."""
    path, settings = tmp_path / "c.db", {"embedder": HashEmbedder(), "max_age": 100 * DEFAULT_MAX_AGE}
    with SpeculationCache.open(path, **settings, max_prefix_bytes=2**40) as cache:
        file = written(cache.prefixes)
    aged(file, 2 * DEFAULT_MAX_AGE)
    assert run("stats", path).exit_code == 0
    with SpeculationCache.open(path, **settings):
        assert file.exists()
    with SpeculationCache.open(path, embedder=HashEmbedder()):
        assert not file.exists()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        written(files)
    assert all_in(files) == set()


def test_a_file_that_is_forgotten_while_another_process_writes_it_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its half-written file is erased, so the writer has nothing to rename."""
    writer, other = opened(tmp_path), opened(tmp_path)
    wait_for_disk = os.fsync

    def forgotten_meanwhile(handle: int) -> None:
        wait_for_disk(handle)
        monkeypatch.undo()
        other.forget(Selection(tenant="shop"))

    monkeypatch.setattr(os, "fsync", forgotten_meanwhile)
    written(writer)
    assert all_in(other) == set()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_plain_file_is_neither_held_nor_read(tmp_path: Path, kind: str) -> None:
    file = written(files := opened(tmp_path))
    moved = file.rename(tmp_path / "elsewhere")
    file.symlink_to(moved) if kind == "link" else file.mkdir()
    assert (files.holds("shop", "a"), files.read("shop", "a")) == (False, None)


def test_a_file_that_cannot_be_read_or_removed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    written(files := opened(tmp_path))
    monkeypatch.setattr(prefix_files, "read_own", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    assert files.read("shop", "a") is None
    files.discard("shop", "a")


def test_a_read_only_cache_serves_them_and_changes_none(tmp_path: Path) -> None:
    """A cache in memory has none."""
    assert SQLiteStore.open().prefixes is None
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        kept, old = written(cache.prefixes), written(cache.prefixes, name="old")
    aged(old, DEFAULT_MAX_AGE + 1)
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder(), read_only=True) as cache:
        assert cache.prefixes.read("shop", "a") == b"content"
        written(cache.prefixes, name="new")
        cache.prefixes.discard("shop", "a")
        assert (kept.exists(), old.exists()) == (True, True)
        assert len(all_in(cache.prefixes)) == 2


@pytest.mark.parametrize("condition", [("--tenant", "shop"), ("--all",), ("--containing", "x")])
def test_the_command_line_forgets_them_too(tmp_path: Path, condition: tuple[str, ...]) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        file = written(cache.prefixes)
    assert run("forget", tmp_path / "c.db", *condition).exit_code == 0
    assert not file.exists()


def test_a_file_that_stays_is_an_error_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    written(files)

    def fail(file: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(prefix_files, "erase_file", fail)
    with pytest.raises(CacheError, match=r"cache\.sqlite-prefixes still holds keys and values \(.*Permission denied"):
        files.forget(Selection(tenant="shop"))


BESIDE = """
    import sys, threading
    from pathlib import Path
    from precedent.cache import Bounds, Selection
    from precedent.cache.prefixes import PrefixFiles
    files = PrefixFiles(Path(sys.argv[1]) / "cache.sqlite", Bounds(max_prefix_bytes=400_000), lambda: 0)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print("working", flush=True)
    rounds = 0
    while not over.is_set():
        for name in "abcde":
            files.write("shop", name, b"theirs" * 20_000, 0)
            read = files.read("shop", name) or b""
            assert any((text * 20_000).endswith(read.lstrip(bytes(1))) for text in (b"theirs", b"ours!!"))
        if rounds % 5 == 4:
            files.forget(Selection(tenant="shop"))
        rounds += 1
    print("done")
"""


def test_two_processes_on_one_folder_read_whole_files_or_none(tmp_path: Path) -> None:
    """Writing, evicting and forgetting at once; what the other one is erasing may begin with zeros."""
    found: set[bytes] = set()
    files = opened(tmp_path, max_prefix_bytes=400_000)
    with Program(["-c", dedent(BESIDE), tmp_path]) as beside:
        assert beside.stdout.readline() == "working\n"
        for number in range(20):
            name = "abcde"[number % 5]
            written(files, name=name, content=b"ours!!" * 20_000)
            found.add((files.read("shop", name) or b"").lstrip(bytes(1)))
            if number % 10 == 9:
                files.forget(Selection(tenant="shop"))
        beside.stdin.close()
        assert beside.stdout.readline() == "done\n"
    assert all(any((text * 20_000).endswith(read) for text in (b"theirs", b"ours!!")) for read in found)
    assert b"ours!!" * 20_000 in found
