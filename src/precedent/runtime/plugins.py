"""What installed packages add under an entry-point group."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from precedent.errors import ConfigError


def installed(group: str) -> list[str]:
    """Return the names in an entry-point group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any:
    """Load what an installed package registers under a name, None if there is no such package."""
    found = next(iter(entry_points(group=group, name=name)), None)
    return None if found is None else found.load()


def not_installed(asked: str, group: str) -> ConfigError:
    """Return the error for a name that no installed package provides; `asked` is how the caller gave it."""
    known = ", ".join(installed(group)) or "none"
    return ConfigError(
        f"{asked} is not installed (installed: {known}). The ones that come with Precedent are installed by: "
        "pip install 'precedent-llm[research]'"
    )
