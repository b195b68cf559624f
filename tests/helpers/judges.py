"""Installs judges for a test, as packages do under the entry-point group `precedent.judges`."""

from __future__ import annotations

from typing import Any

import pytest

from precedent import verify


def install_judges(monkeypatch: pytest.MonkeyPatch, **judges: Any) -> None:
    """Install these judges by name, and no others."""
    verify._installed_verifier.cache_clear()  # or a mode keeps the judge that it had in another test
    monkeypatch.setattr("precedent_research.judge.load_plugin", lambda group, name: _maker(judges, name))
    monkeypatch.setattr("precedent_research.judge.installed", lambda group: sorted(judges))


def _maker(judges: dict[str, Any], name: str) -> Any:
    return None if name not in judges else lambda: judges[name]
