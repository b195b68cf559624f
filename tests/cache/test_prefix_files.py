"""Kept prefixes as files: modes, bounds, age, forgetting, half-written files, and several processes on one folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.cache_commands import run
from helpers.prefix_folders import aged, all_in, opened, written

from precedent.cache import Bounds, Selection, SpeculationCache, SQLiteStore
from precedent.cache.prefixes import ABANDONED, DEFAULT_MAX_AGE, PrefixFiles
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


def test_what_is_larger_than_the_bound_is_not_written_and_costs_nobody_theirs(tmp_path: Path) -> None:
    files = opened(tmp_path, max_prefix_bytes=25)
    written(files)
    assert not written(files, name="b", content=bytes(26)).exists()
    assert files.holds("shop", "a")


def test_a_file_that_grew_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    written(opened(tmp_path), content=bytes(26))
    files = PrefixFiles(tmp_path / "cache.sqlite", Bounds(max_prefix_bytes=25), lambda: 0, read_only=True)
    assert files.read("shop", "a") is None


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


def test_an_old_file_goes_when_another_is_written(tmp_path: Path) -> None:
    files = opened(tmp_path)
    aged(written(files), DEFAULT_MAX_AGE + 1)
    written(files, "other", "b")
    assert len(all_in(files)) == 1


# Half-written files


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        written(files)
    assert all_in(files) == set()


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


# Stores


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.path.write_text("not a folder")
    with pytest.raises(CacheError, match=r"prefixes cannot be kept in .*cache\.sqlite-prefixes"):
        files.create()


def test_a_read_only_cache_serves_them_and_changes_none(tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        kept, old = written(cache.prefixes), written(cache.prefixes, name="old")
    aged(old, DEFAULT_MAX_AGE + 1)
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder(), read_only=True) as cache:
        assert cache.prefixes.read("shop", "a") == b"content"
        written(cache.prefixes, name="new")
        cache.prefixes.discard("shop", "a")
        assert (kept.exists(), old.exists()) == (True, True)
        assert len(all_in(cache.prefixes)) == 2


def test_a_cache_in_memory_has_none() -> None:
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        assert cache.prefixes is None
    assert SQLiteStore.open().prefixes is None
