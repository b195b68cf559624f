"""How many processors a container may use: Linux's control groups, of both versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def cpu_quota(groups: Path = GROUPS, mount: Path = MOUNT) -> float | None:
    """Processors' worth of time that this process's control group and those above it allow; None without a limit."""
    limits = [limit for folder in _folders(groups, mount) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(groups: Path, mount: Path) -> Iterator[Path]:
    """The folders of the process's groups and all above them."""
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
