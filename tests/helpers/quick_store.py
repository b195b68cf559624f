"""A cache that does not wait for the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from precedent.cache import SQLiteStore


def quick_store(path: Path | None, **settings: Any) -> SQLiteStore:
    """A store that does not wait for the disk: thousands of transactions in seconds."""
    store = SQLiteStore.open(path, **settings)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    return store
