"""Kept prefixes as files: modes, bounds, age, half-written files, forgetting, and several processes on one folder."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from helpers.prefix_folders import aged, all_in, opened, written

from precedent.cache import Selection, SpeculationCache
from precedent.cache.prefixes import ABANDONED, DEFAULT_MAX_AGE
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
