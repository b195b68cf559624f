"""What `pip install precedent-llm` downloads and takes on disk, in MB, and the largest parts.

    python benchmarks/bench_install.py [--dist dist] [--python python3.11 python3.12] [--json FILE]

Takes our wheels from the folder of `make dist`, and asks pip for the pinned versions of the others, with each Python:
`cpu` and `cuda` are the builds of torch that it finds. Nothing is installed: the disk is that of the files in the
wheels, without what Python compiles from them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from measuring import ROOT, options, run

LARGEST = 6


def downloaded(python: str, dist: Path, folder: Path) -> list[Path]:
    """Let pip download core and all that it needs into a folder."""
    (core,) = dist.glob("precedent_llm-*.whl")
    given = ["-c", str(ROOT / "constraints.txt"), "--find-links", str(dist), "--dest", str(folder), str(core)]
    subprocess.run((python, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *given), check=True)
    return sorted(folder.iterdir())


def sizes(wheels: list[Path]) -> dict[str, Any]:
    """MB of a set of wheels, together and by package; NVIDIA's libraries count as one."""
    found: dict[str, list[float]] = {}
    for wheel in wheels:
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        with zipfile.ZipFile(wheel) as archive:
            disk = sum(file.file_size for file in archive.infolist())
        part = found.setdefault("nvidia" if name.startswith(("nvidia-", "cuda-")) else name, [0.0, 0.0])
        part[0] += wheel.stat().st_size / 1e6
        part[1] += disk / 1e6
    largest = sorted(found.items(), key=lambda entry: -entry[1][1])[:LARGEST]
    return {
        "packages": len(wheels),
        "download_mb": sum(download for download, _ in found.values()),
        "disk_mb": sum(disk for _, disk in found.values()),
        "largest": {name: {"download_mb": download, "disk_mb": disk} for name, (download, disk) in largest},
    }


def measure(given: Namespace) -> dict[str, Any]:
    figures = {}
    for python in given.python:
        with tempfile.TemporaryDirectory() as name:
            wheels = downloaded(python, Path(given.dist), Path(name))
            figures["cuda" if any(wheel.name.startswith("nvidia_") for wheel in wheels) else "cpu"] = sizes(wheels)
    return figures


if __name__ == "__main__":
    run(options(__doc__, dist="dist", python=[sys.executable]), measure)
