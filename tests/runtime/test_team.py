"""The number of threads of a forward follows the processors that other programs leave free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precedent.runtime.machine_load import CpuTimes
from precedent.runtime.openmp import openmp_function
from precedent.runtime.team import INTERVAL, Team, cpu_quota, fitted_team

STEP = INTERVAL + 0.05


class Machine:
    """A machine on which other programs take `others` processors; its clock moves on request."""

    def __init__(self, processors: int) -> None:
        self.processors, self.others, self.now, self.busy = processors, 0.0, 100.0, 0.0

    def read(self) -> CpuTimes:
        return CpuTimes(self.now, self.busy, 0.0, self.processors)

    def clock(self) -> float:
        return self.now

    def run(self, seconds: float) -> None:
        self.now, self.busy = self.now + seconds, self.busy + seconds * self.others


def team_on(machine: Machine, quota: float | None = None) -> Team:
    return Team(machine.read, machine.clock, lambda: quota)


def sizes(team: Team, machine: Machine, seconds: float, most: int = 2) -> list[int]:
    """The sizes chosen meanwhile, one per `STEP`."""
    found = []
    for _ in range(round(seconds / STEP)):
        machine.run(STEP)
        found.append(team.size(most))
    return found


def test_a_neighbour_takes_a_thread_away_and_gives_it_back_within_two_seconds() -> None:
    machine = Machine(2)
    team = team_on(machine)
    sizes(team, machine, 1.0)
    for _ in range(3):
        machine.others = 0.67  # what a busy loop gets beside two threads
        assert sizes(team, machine, 2.0)[-1] == 1
        machine.others = 1.0  # and beside one
        assert set(sizes(team, machine, 5.0)) == {1}
        machine.others = 0.0
        assert sizes(team, machine, 2.0)[-1] == 2


@given(st.floats(0.0, 8.0), st.integers(1, 8))
def test_the_team_settles_at_the_free_processors(others: float, most: int) -> None:
    """And stays there: no size alternates with another while the load is steady."""
    machine = Machine(8)
    machine.others = others
    found = sizes(team_on(machine), machine, 10.0, most)
    assert len(set(found[10:])) == 1
    assert max(1.0, min(most, 8 - others - 1.0)) <= found[-1] <= max(1.0, min(most, 8 - others + 1.0))


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (8.0, 4), (2.5, 2), (1.0, 1), (0.3, 1)])
def test_a_quota_limits_the_team(quota: float | None, expected: int) -> None:
    assert team_on(Machine(4), quota).size(4) == expected


class Sizes(Team):
    """A team of the given sizes, in turn."""

    def __init__(self, *of: int) -> None:
        super().__init__()
        self._of = list(of)

    def size(self, most: int) -> int:
        return self._of.pop(0)


def fail_within(team: Team) -> None:
    with fitted_team(team):
        raise ValueError(f"computed by {torch.get_num_threads()}")


@pytest.mark.skipif(openmp_function("omp_set_num_threads") is None, reason="torch runs without OpenMP here")
def test_only_the_computation_gets_the_smaller_team() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="by 1"):
            fail_within(Sizes(1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def groups(folder: Path, line: str) -> Path:
    file = folder / "cgroup"
    file.write_text(line)
    return file


def v2(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text)


def v1(folder: Path, quota: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("write", "line", "expected"),
    [
        (lambda root: v2(root / "a/b", "150000 100000\n"), "0::/a/b\n", 1.5),
        (lambda root: v2(root / "a", "50000 100000\n"), "0::/a/b\n", 0.5),
        (lambda root: v2(root, "200000 100000\n"), "0::/elsewhere/on/the/host\n", 2.0),
        (lambda root: v2(root, "max 100000\n"), "0::/\n", None),
        (lambda root: v2(root, "rubbish\n"), "0::/\n", None),
        (lambda root: v1(root / "cpu,cpuacct/a", "300000\n"), "4:cpu,cpuacct:/a\n", 3.0),
        (lambda root: v1(root / "cpu", "100000\n"), "4:cpu,cpuacct:/a\n", 1.0),
        (lambda root: v1(root / "cpu", "-1\n"), "1:cpu:/\n", None),
        (lambda root: v1(root / "memory", "100000\n"), "1:memory:/\n", None),
    ],
)
def test_the_quota_of_a_container(
    write: Callable[[Path], None], line: str, expected: float | None, tmp_path: Path
) -> None:
    write(tmp_path / "fs")
    (tmp_path / "fs").mkdir(exist_ok=True)
    assert cpu_quota(groups(tmp_path, line), tmp_path / "fs") == expected
