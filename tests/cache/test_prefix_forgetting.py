"""Forgetting reaches kept prefixes; several processes share their folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.cache_commands import run
from helpers.prefix_folders import aged, all_in, opened, written

from precedent.cache import Selection, SpeculationCache
from precedent.cache import prefixes as prefix_files
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder

TENANTS = ("shop", "other")
BETWEEN = time.time() - 500
"""A time between the young and the old, however long after this line they are written."""


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection(tenant="shop"), {"other young", "other old"}),
        (Selection(before=BETWEEN), {"shop young", "other young"}),
        (Selection(tenant="other", before=BETWEEN), {"shop young", "shop old", "other young"}),
        (Selection(before=float("inf")), set()),
        (Selection(tenant="shop", containing="Elm Street"), {"other young", "other old"}),
        (Selection(containing="Elm Street"), set()),
        (Selection(ids=(1, 2)), {"shop young", "shop old", "other young", "other old"}),
        (Selection(tenant="shop", ids=(1,)), {"shop young", "shop old", "other young", "other old"}),
    ],
    ids=["tenant", "age", "tenant and age", "all", "tenant and text", "text", "ids", "tenant and ids"],
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


@pytest.mark.parametrize("condition", [("--tenant", "shop"), ("--all",), ("--containing", "x")])
def test_the_command_line_forgets_them_too(tmp_path: Path, condition: tuple[str, ...]) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        file = written(cache.prefixes)
    assert run("forget", tmp_path / "c.db", *condition).exit_code == 0
    assert not file.exists()


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


def test_a_file_that_stays_is_an_error_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    written(files)

    def fail(file: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(prefix_files, "erase_file", fail)
    with pytest.raises(CacheError, match=r"cache\.sqlite-prefixes still holds keys and values \(.*Permission denied"):
        files.forget(Selection(tenant="shop"))


# Together


@contextmanager
def working_beside(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes, reads and forgets in the folder until its input ends."""
    program = """
        import sys, threading, time
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
    lines = [line.removeprefix("        ") for line in program.splitlines()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", "\n".join(lines), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout.readline() == "working\n"
        yield process
        said, _ = process.communicate()
        assert (said, process.returncode) == ("done\n", 0)


def test_two_processes_on_one_folder_read_whole_files_or_none(tmp_path: Path) -> None:
    """Writing, evicting and forgetting at once; what the other one is erasing may begin with zeros."""
    found: set[bytes] = set()
    files = opened(tmp_path, max_prefix_bytes=400_000)
    with working_beside(tmp_path):
        for number in range(200):
            name = "abcde"[number % 5]
            written(files, name=name, content=b"ours!!" * 20_000)
            found.add((files.read("shop", name) or b"").lstrip(bytes(1)))
            if number % 50 == 49:
                files.forget(Selection(tenant="shop"))
    assert all(any((text * 20_000).endswith(read) for text in (b"theirs", b"ours!!")) for read in found)
    assert b"ours!!" * 20_000 in found


@pytest.mark.parametrize("seed", range(20))
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
