"""Where the demo keeps its warm cache and the list of warming requests done, so that a killed demo can continue."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs

LAYOUT = "3"
"""Increase it when requests, prompts or templates change, because completions stored before no longer match."""


class DemoState:
    """A folder in the user's cache folder, one per target, draft model, dtype, temperature and size of the demo."""

    def __init__(self, *identity: object) -> None:
        key = hashlib.sha256(json.dumps([LAYOUT, *map(str, identity)]).encode()).hexdigest()[:16]
        self.folder = Path(platformdirs.user_cache_dir("precedent")) / "demo" / key
        self._file = self.folder / "warmed.json"

    @property
    def cache_path(self) -> Path:
        """The speculation cache's folder."""
        return self.folder / "cache"

    def warmed(self) -> list[str]:
        """Names of the requests whose completions are stored; empty if the list cannot be read."""
        try:
            names = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def mark_warmed(self, names: Sequence[str]) -> None:
        """Replace the list atomically; the completions themselves are already on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(list(names)), encoding="utf-8")
        temporary.replace(self._file)
