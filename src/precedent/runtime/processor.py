"""Describes the machine that a measurement ran on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name: from `/proc/cpuinfo` on Linux, from Python's `platform` elsewhere."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
