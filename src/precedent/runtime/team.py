"""How many threads compute a forward: no more than there are processors that other programs leave free.

The threads of a forward wait for each other some hundred times. If another program runs in the place of one of them,
all the others wait: on two processors of which one is taken, two threads need 2.7 times as long as on a quiet machine,
one thread 1.45 times. So the size of the team is chosen before each forward, from the processor time that other
programs took a moment ago. The rows of a tree give the same bits with any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from precedent.runtime.fence import Fence
from precedent.runtime.machine_load import CpuTimes, OtherPrograms, cpu_times
from precedent.runtime.openmp import openmp_function
from precedent.runtime.process import Lock

INTERVAL = 0.2
"""Seconds between two readings; the kernel counts in hundredths of a second."""

LONGEST = 2.0
"""Seconds after which a reading says nothing about the present; the next one decides."""

SMOOTHING = 0.5
"""Weight of the newest reading."""

TOO_LARGE = 0.55
"""Processors that must be missing before the team shrinks."""

ROOM = 0.7
"""Further processors that must be free before the team grows."""


GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cpu_quota(groups: Path = GROUPS, mount: Path = MOUNT) -> float | None:
    """Processors' worth of time that this process's control group and those above it allow; None without a limit."""
    limits = [limit for folder in _folders(groups, mount) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(groups: Path, mount: Path) -> Iterator[Path]:
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            root = next(filter(Path.is_dir, (mount / controllers, mount / "cpu")), mount) if controllers else mount
            within = root.joinpath(path.lstrip("/"))
            yield from (within, *(above for above in within.parents if above.is_relative_to(root)))


def _limit(folder: Path) -> float | None:
    """The limit in one folder: `cpu.max` of version 2, or the two files of version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None


class Team:
    """Chooses the number of threads; shared by all engines of a process.

    Where reading the machine's load fails, a forward takes as many threads as it may.
    """

    def __init__(
        self,
        read: Callable[[], CpuTimes | None] = cpu_times,
        clock: Callable[[], float] = time.monotonic,
        quota: Callable[[], float | None] = cpu_quota,
    ) -> None:
        self._read, self._clock, self._quota = read, clock, quota
        self._others: OtherPrograms | None = None
        self._read_at = 0.0
        self._processors = 0
        self._left = 0
        self._taken: float | None = None
        self._limit: float | None = None
        self._lock = Lock()
        self.fence = Fence("machine load")

    def size(self, most: int) -> int:
        """How many of up to `most` threads to use now: at least one, at most what the container's quota allows."""
        return 1 if most == 1 else self.fence.run(lambda: self._size(most), most)

    def _size(self, most: int) -> int:
        with self._lock:
            self._update()
            left = self._left or most
            return max(1, min(most, left, int(self._limit or most)))

    def _update(self) -> None:
        now = self._clock()
        if self._others is None:
            self._begin()
        elif now - self._read_at < INTERVAL:
            return
        else:
            share = self._others.share()
            if share is not None and self._processors and now - self._read_at <= LONGEST:
                self._learn(share * self._processors)
        self._read_at = now

    def _begin(self) -> None:
        first = self._read()
        self._others, self._limit = OtherPrograms(self._read), self._quota()
        self._processors = self._left = 0 if first is None else first.processors

    def _learn(self, taken: float) -> None:
        """Update the number of processors left, given how many other programs `taken` in the last interval."""
        before = taken if self._taken is None else self._taken
        self._taken = before + SMOOTHING * (taken - before)
        free = self._processors - self._taken
        if free < self._left - TOO_LARGE:
            self._left = max(1, int(free + 1.0 - TOO_LARGE))
        elif free > self._left + ROOM:
            self._left = int(free + 1.0 - ROOM)


TEAM = Team()


@contextmanager
def fitted_team(team: Team = TEAM) -> Iterator[int]:
    """Let the calling thread compute with as many threads as `team` says, at most as many as it has, and tell how many.

    Afterwards it has as many as before. Changes nothing unless torch runs on OpenMP.
    """
    import torch  # here: a process that only stores vectors does not need it

    set_threads = openmp_function("omp_set_num_threads")
    most = torch.get_num_threads()
    size = most if set_threads is None else team.size(most)
    if size == most:
        yield most
        return
    set_threads(size)
    try:
        yield size
    finally:
        set_threads(most)
