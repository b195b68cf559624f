"""Fixtures that several tests of running ahead share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.run_ahead_agents import WAYS, Run, way


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log goes."""
    return tmp_path / "log.jsonl"


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run an agent in one of four ways; returns the messages at its end."""
    return way(request.param)
