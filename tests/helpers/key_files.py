"""Key files as somebody may have written them by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from precedent_server.keys import read_keys

posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows has no modes")

ENTRY = {"name": "desk", "tenant": "shop", "role": "use", "created": "2026-01-02T03:04:05Z", "sha256": "0" * 64}


KEY = "pk-" + "Secret_Key-of_43-characters-0123456789abcde"
"""Looks like a key."""


def names(path: Path) -> list[str]:
    return [one.name for one in read_keys(path)]


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path
