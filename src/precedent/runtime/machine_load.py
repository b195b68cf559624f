"""The machine: how much processor time other programs take, by Linux's `/proc/stat`, and what processor it has.

The time decides whether a measured time can be trusted.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")

BUSY_SHARE = 0.1
"""Share of processor time taken by other programs above which a measured time is not trusted."""

IDLE_COLUMNS = (3, 4)
"""Columns of a processor's line in `/proc/stat`: idle, and idle while waiting for a disk."""

GUEST_COLUMNS = (8, 9)
"""Columns with the time of virtual machines, which earlier columns already include."""


class CpuTimes(NamedTuple):
    """Seconds by the clock, of work on all processors and of this process's work, and the number of processors."""

    clock: float
    busy: float
    own: float
    processors: int


class OtherPrograms:
    """Watches how much time other programs take on the processors that this process may use.

    `read` returns the times, or None if this machine does not report them.
    """

    def __init__(self, read: Callable[[], CpuTimes | None] | None = None) -> None:
        self._read = read or cpu_times
        self._before = self._read()

    def share(self) -> float | None:
        """Other programs' share of processor time since the last call (or creation), 0 to 1; None if unknown.

        The kernel counts in hundredths of a second, so a window of less than one second says little.
        """
        before, self._before = self._before, self._read()
        return share_of_others(before, self._before)


def share_of_others(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Other programs' share of processor time between two readings, 0 to 1; None if unknown."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    busy, own = after.busy - before.busy, after.own - before.own
    if busy < own / 2:  # the counters do not move, as in some sandboxes
        return None
    return min(1.0, max(0.0, busy - own) / (after.processors * (after.clock - before.clock)))


def cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """The times of the processors that this process may use, stolen time included; None if the system has none."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    columns = [line.split() for line in lines if line.split(" ", 1)[0] in ours]
    if not columns:
        return None
    left_out = {*IDLE_COLUMNS, *GUEST_COLUMNS}
    ticks = sum(int(value) for name, *values in columns for at, value in enumerate(values) if at not in left_out)
    own = os.times()
    used = own.user + own.system + own.children_user + own.children_system
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), used, len(columns))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name: from `/proc/cpuinfo` on Linux, from Python's `platform` elsewhere."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
