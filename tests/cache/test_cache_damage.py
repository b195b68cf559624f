"""Kills at the worst moments, disks that run full, thousands of damaged files: nothing lost, nothing wrong served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

OWN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def counts_of(script: str, *arguments: object, before: tuple[str, ...] = ()) -> list[dict]:
    """What a script prints, a line of JSON for each count."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("NUMBA_BOUNDSCHECK", None)
    command = [*before, sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def why_no_small_disk(folder: Path) -> str | None:
    """Why no file system can be mounted here, None where one can."""
    if shutil.which("unshare") is None:
        return "there is no program `unshare`, so that no small disk can be mounted"
    command = [*OWN_NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"this system lets nobody mount a small disk: {tried.stderr.strip()}" if tried.returncode else None


def fill_disks(folder: Path, number: int) -> dict:
    reason = why_no_small_disk(folder)
    if reason:
        pytest.skip(reason)
    (counts,) = counts_of("small_disk.py", folder, number, 3, before=OWN_NAMESPACE)
    return counts


@pytest.fixture
def in_memory(tmp_path):
    """A folder in memory where there is one: what is asked of thousands of files is not how fast a disk is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as folder:
        yield Path(folder)


AIMS = ("file-limit", "checkpoint", "vacuum", "eviction", "creation", "set-aside")


def test_kills_at_the_worst_moments_lose_nothing(tmp_path):
    counts = {one["aim"]: one for one in counts_of("aimed_kills.py", tmp_path, ",".join(AIMS), 2, 3)}
    assert counts.keys() == set(AIMS)
    assert counts["file-limit"]["torn"] == 2, "each of these kills left a file that is worthless without its log"


def test_kills_at_random_moments_of_four_processes_lose_nothing(tmp_path):
    (counts,) = counts_of("crashing_store.py", tmp_path, 12, 7)
    assert counts["kills"] == 12
    assert counts["acknowledged"] > 0


def test_a_disk_that_runs_full_loses_nothing(tmp_path):
    assert fill_disks(tmp_path, 2)["torn"] > 0


def test_damaged_and_hostile_files_are_refused_or_served_right(in_memory):
    (counts,) = counts_of("damaged_files.py", in_memory, 100, 4)
    assert counts["files"] == 100
    assert min(counts["refused"], counts["set aside"], counts["served"]) > 10


@pytest.mark.stress
@pytest.mark.parametrize("aim", AIMS)
def test_a_hundred_aimed_kills_lose_nothing(tmp_path, aim):
    (counts,) = counts_of("aimed_kills.py", tmp_path, aim, 100, 5)
    assert counts["kills"] == 100
    assert aim not in ("file-limit", "checkpoint") or counts["torn"] > 20


@pytest.mark.stress
def test_a_thousand_kills_at_random_moments_lose_nothing(tmp_path):
    (counts,) = counts_of("crashing_store.py", tmp_path, 1000, 7)
    assert counts["acknowledged"] > counts["kills"] == 1000


@pytest.mark.stress
def test_twenty_full_disks_lose_nothing(tmp_path):
    counts = fill_disks(tmp_path, 20)
    assert counts["disks"] == 20
    assert counts["torn"] > 10


@pytest.mark.stress
def test_ten_thousand_damaged_files(in_memory):
    (counts,) = counts_of("damaged_files.py", in_memory, 10_000, 6)
    assert counts["files"] == 10_000
