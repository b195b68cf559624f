"""Commands of installed packages (entry-point group `precedent.commands`), and what brings those that are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from precedent import COMMANDS
from precedent.errors import ConfigError

GROUP = "precedent.commands"
"""An entry point names a `typer.Typer`; its commands join those of `precedent`, a named one as a group of its own."""

_log = logging.getLogger(__name__)


def add_installed(app: typer.Typer) -> None:
    """Add the commands of installed packages, then for each missing one a command that says which package brings it.

    A package whose commands cannot be imported is reported and left out, so that the others work.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name, entry in sorted(found.items()):
        try:
            app.add_typer(entry.load())
        except Exception as error:
            _log.warning("the command %s of %s is left out: %s", name, entry.value, error)
    for name, extra in COMMANDS.items():
        if name not in found:
            app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})(_missing(name, extra))


def _missing(name: str, extra: str) -> Callable[..., None]:
    def command(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise ConfigError(f"`precedent {name}` is not installed: pip install 'precedent-llm[{extra}]'")

    return command
