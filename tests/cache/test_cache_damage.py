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
AIMS = ("file-limit", "checkpoint", "vacuum", "eviction", "creation", "set-aside")


def counts_of(script: str, *arguments: object, before: tuple[str, ...] = ()) -> list[dict]:
    """What a script prints, a line of JSON for each count."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("NUMBA_BOUNDSCHECK", None)
    command = [*before, sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture
def in_memory(tmp_path):
    """A folder in memory where there is one: what is asked of thousands of files is not how fast a disk is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.stress)])
def test_kills_at_the_worst_moments_lose_nothing(tmp_path, kills):
    counts = {one["name"]: one for one in counts_of("kills.py", tmp_path, ",".join(AIMS), kills, 3)}
    assert counts.keys() == set(AIMS)
    assert counts["file-limit"]["torn"] > kills / 2, "such a kill leaves a file that is worthless without its log"
    assert kills < 100 or counts["checkpoint"]["torn"] > 20


@pytest.mark.parametrize("kills", [12, pytest.param(1000, marks=pytest.mark.stress)])
def test_kills_at_random_moments_of_four_processes_lose_nothing(tmp_path, kills):
    (counts,) = counts_of("kills.py", tmp_path, "at-any-moment", kills, 7)
    assert counts["kills"] == kills
    assert counts["acknowledged"] > 0


@pytest.mark.parametrize("disks", [2, pytest.param(20, marks=pytest.mark.stress)])
def test_a_disk_that_runs_full_loses_nothing(tmp_path, disks):
    if shutil.which("unshare") is None:
        pytest.skip("there is no program `unshare`, so that no small disk can be mounted")
    command = [*OWN_NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this system lets nobody mount a small disk: {tried.stderr.strip()}")
    (counts,) = counts_of("kills.py", tmp_path, "full-disks", disks, 3, before=OWN_NAMESPACE)
    assert counts["disks"] == disks
    assert counts["torn"] > disks / 4


@pytest.mark.parametrize("files", [100, pytest.param(10_000, marks=pytest.mark.stress)])
def test_damaged_and_hostile_files_are_refused_or_served_right(in_memory, files):
    (counts,) = counts_of("damage.py", in_memory, files, 4)
    assert counts["files"] == files
    assert min(counts["refused"], counts["set aside"], counts["served"]) > files / 10
