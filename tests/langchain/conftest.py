"""Fixtures that several tests of LangChain share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log goes."""
    return tmp_path / "log.jsonl"
