"""How much memory a device has left, and how to free more."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

UNKNOWN = 4 * 2**30
"""Bytes assumed to be free if the system does not report any figure."""

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now; on a CPU, within the container's limit too."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    known = [found for found in (_available_to_system(), _left_to_container()) if found is not None]
    return min(known, default=UNKNOWN)


def give_back() -> None:
    """Collect garbage and return the memory that torch caches to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _available_to_system() -> int | None:
    """Linux's MemAvailable; elsewhere half of the physical memory."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


def _left_to_container() -> int | None:
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
