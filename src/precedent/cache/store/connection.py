"""A connection to the SQLite file: how every one of them is set up."""

from __future__ import annotations

import sqlite3
import unicodedata
from pathlib import Path

BUSY_SECONDS = 20.0
"""How long a transaction waits for that of another process."""


def connect(path: Path | None, mode: str = "mode=rw") -> sqlite3.Connection:
    """Open an existing file (a new database in memory for None) for use from any thread, one at a time."""
    target = ":memory:" if path is None else f"{path.resolve().as_uri()}?{mode}"
    connection = sqlite3.connect(
        target, uri=path is not None, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = _decoded
    connection.create_function("folded_contains", 2, _folded_contains, deterministic=True)
    connection.execute("PRAGMA temp_store=MEMORY")  # a temporary file would be one more place to erase from
    return connection


def folded(text: str) -> str:
    """`text` for comparison without regard to case and to how accents are composed."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _folded_contains(text: bytes | None, folded_needle: str) -> bool:
    return folded_needle in folded(_decoded(text or b""))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")  # damaged text must not make its neighbours unreadable
