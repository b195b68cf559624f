"""A folder of kept prefixes: open it, write to it, age its files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from precedent.cache import Bounds
from precedent.cache.prefixes import PrefixFiles

TENANTS = ("shop", "other")


def opened(folder: Path, **bounds: Any) -> PrefixFiles:
    """The files beside a cache; nobody calls `forget` on the cache itself."""
    return PrefixFiles(folder / "cache.sqlite", Bounds(**bounds), lambda: 0)


def written(files: PrefixFiles, tenant: str = "shop", name: str = "a", content: bytes = b"content") -> Path:
    files.write(tenant, name, content, files.generation())
    return files._file(tenant, name)


def aged(file: Path, seconds: float, *, unused: float = 0.0) -> None:
    """Let a file have been written, and last used, so long ago."""
    os.utime(file, (time.time() - unused, time.time() - seconds))


def all_in(files: PrefixFiles) -> set[str]:
    return {f"{file.parent.name[:4]}/{file.name}" for file in files.path.glob("*/*")}
