"""Nothing outside a cache is changed by way of a link, a pipe or a second name; other people's files beside it stay."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from helpers.prefix_folders import written

from precedent.cache import Completion, Selection, SpeculationCache, SQLiteStore, verify_cache
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes of this kind are POSIX's")

OLD = time.time() - 400 * 86_400


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else's, with old files under all names that Precedent uses, and folders of such files."""
    folder = tmp_path / "outside"
    for inner in (folder, folder / ("a" * 32)):
        inner.mkdir()
        for name in (
            "a.safetensors",
            ".precedent-abcdefgh.new",
            "notes.txt",
        ):
            (inner / name).write_text("mine")
            os.utime(inner / name, (OLD, OLD))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def filled(folder: Path) -> Path:
    """A cache with a kept prefix and two records."""
    with SpeculationCache.open(folder, embedder=HashEmbedder()) as cache:
        for number in range(2):
            cache.insert(Completion((number, number + 1), "tok", "model", query=f"query {number}"))
        written(cache.prefixes, "default")
    return folder / "precedent.sqlite"


def replaced(path: Path, target: Path) -> None:
    """Put a link in a path's place."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + "-was"))
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def one_in(folder: Path, pattern: str) -> Path:
    return next(iter(sorted(folder.glob(pattern))))


def folders_of(file: Path) -> dict[str, Path]:
    prefixes = Path(f"{file}-prefixes")
    return {
        "prefixes": prefixes,
        "a tenant's prefixes": one_in(prefixes, "*"),
    }


def used(file: Path) -> None:
    """Open, store, forget, compact and open again; any of it may be refused, by Precedent's own errors."""
    for use in (
        lambda cache: cache.insert(Completion((7, 8), "tok", "model", query="more")),
        lambda cache: written(cache.prefixes, "default", "b"),
        lambda cache: cache.prefixes.sweep(),
        lambda cache: cache.forget(tenant="default"),
        lambda cache: cache.forget(before=float("inf")),
    ):
        try:
            with SpeculationCache.open(file, embedder=HashEmbedder()) as cache:
                use(cache)
        except (CacheError, OSError):
            continue
    try:
        with closing(SQLiteStore.open(file)) as store:
            store.compact()
    except CacheError:
        pass


@pytest.mark.parametrize("which", ["prefixes", "a tenant's prefixes"])
def test_a_linked_folder_is_refused_by_name_and_nothing_in_it_changes(
    tmp_path: Path, outside: Path, which: str
) -> None:
    file = filled(tmp_path / "cache")
    folder = folders_of(file)[which]
    replaced(folder, outside)
    before = contents(outside)
    with pytest.raises(CacheError, match=rf"{folder.name} is a link"):  # noqa: SIM117
        with SpeculationCache.open(file, embedder=HashEmbedder()) as cache:
            cache.forget(tenant="default")
    if folder in file.parent.iterdir():
        with pytest.raises(CacheError, match=rf"{folder.name} is a link"):
            verify_cache(file)
    used(file)
    assert contents(outside) == before


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_file_that_is_not_precedents_alone_is_never_written_to(tmp_path: Path, outside: Path, kind: str) -> None:
    file, mine = filled(tmp_path / "cache"), outside / "notes.txt"
    for path in file.parent.glob(f"{file.name}-prefixes/*/a.safetensors"):
        path.unlink(missing_ok=True)
        if kind == "link":
            path.symlink_to(mine)
        elif kind == "second name":
            os.link(mine, path)
            os.utime(mine)  # too old a file is removed before anything is forgotten
        else:
            os.mkfifo(path)
    before = contents(outside)
    used(file)
    assert contents(outside) == before


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_sqlite_does_not_write_through_a_link(tmp_path: Path, outside: Path, ending: str) -> None:
    file, mine = filled(tmp_path / "cache"), outside / "notes.txt"
    Path(f"{file}{ending}").symlink_to(mine)
    before = contents(outside)
    with pytest.raises(CacheError, match=rf"precedent.sqlite{ending} is a link"):
        SQLiteStore.open(file)
    used(file)
    assert contents(outside) == before


def test_other_peoples_files_beside_and_inside_stay(tmp_path: Path) -> None:
    """Only names that Precedent gives are swept up, evicted, forgotten and erased."""
    file = filled(tmp_path)
    theirs = [
        *(tmp_path / name for name in (".precedent-notes.new", ".precedent-abcdefgh.new.txt")),
        *(folder / "notes.txt" for folder in folders_of(file).values()),
        Path(f"{file}-prefixes") / "photos" / "a.safetensors",
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        os.utime(path, (OLD, OLD))
    unfinished = tmp_path / ".precedent-abcdefgh.new"
    unfinished.mkdir()
    (unfinished / "notes.txt").write_text("mine")
    used(file)
    assert [path for path in [*theirs, unfinished / "notes.txt"] if path.read_text() != "mine"] == []


def test_a_link_to_a_whole_cache_is_followed(tmp_path: Path) -> None:
    """To a folder, or to the file: then everything beside it lies beside the real file."""
    file = filled(tmp_path / "real")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "file.db").symlink_to(file)
    for place in (tmp_path / "folder", tmp_path / "file.db"):
        with closing(SQLiteStore.open(place)) as store:
            assert len(store.list(Selection(), None)) == 2
            store.insert(Completion((9, 9), "tok", "model"), None, None)
            assert store.forget(Selection(containing="no such text")) == 0
            assert store.forget(Selection(ids=(store.list(Selection(), 1)[0].id,))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.db", "folder", "real"]
