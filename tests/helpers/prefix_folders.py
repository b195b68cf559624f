"""A folder of kept prefixes: open it, write to it, age its files."""


from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.cache_commands import run

from precedent.cache import Bounds, Selection, SpeculationCache, SQLiteStore
from precedent.cache.store import prefix_files
from precedent.cache.store.prefix_files import ABANDONED, DEFAULT_MAX_AGE, PrefixFiles
from precedent.errors import CacheError
from precedent.testing.embedders import HashEmbedder

TENANTS = ("shop", "other")


def opened(folder: Path, **bounds: Any) -> PrefixFiles:
    return PrefixFiles(folder / "cache.sqlite", Bounds(**bounds))


def written(files: PrefixFiles, tenant: str = "shop", name: str = "a", content: bytes = b"content") -> Path:
    files.write(tenant, name, content, time.time_ns())
    return files._file(tenant, name)


def aged(file: Path, seconds: float, *, unused: float = 0.0) -> None:
    """Let a file have been written, and last used, so long ago."""
    os.utime(file, (time.time() - unused, time.time() - seconds))


def all_in(files: PrefixFiles) -> set[str]:
    return {f"{file.parent.name[:4]}/{file.name}" for file in files.path.glob("*/*")}


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
