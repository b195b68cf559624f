"""Tests as if some packages of the group `precedent.models` were not installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest

from precedent.target import support


def hide_packages(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide these entries of the group, or all of them, until the patch is undone."""
    left = [entry for entry in entry_points(group=support.GROUP) if names and entry.name not in names]
    found = tuple(entry.load() for entry in left)
    patch.setattr(support, "installed", lambda: found)


def graph_settings(**settings: Any) -> Any:
    """Settings of `cuda_graphs`; skips the test where precedent-cuda is not installed."""
    return pytest.importorskip("precedent_cuda").StaticSettings(**settings)
