"""Finds the tool format of a chat template among the built-in formats and those of other packages."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from precedent.errors import ConfigError
from precedent.text.tool_formats.builtin import BUILTIN
from precedent.text.tool_formats.description import ToolFormat

GROUP = "precedent.tool_formats"


@lru_cache(maxsize=1)
def known_formats() -> tuple[ToolFormat, ...]:
    """All formats, those of other packages first. Raises ConfigError for an entry point that is not a `ToolFormat`."""
    return (*map(_loaded, sorted(entry_points(group=GROUP), key=lambda point: point.name)), *BUILTIN)


def format_of_template(template: str) -> ToolFormat | None:
    """The format in which a chat template writes calls, None if unknown."""
    return next((form for form in known_formats() if form.wrote(template)), None)


def _loaded(point: EntryPoint) -> ToolFormat:
    form = point.load()
    if not isinstance(form, ToolFormat):
        raise ConfigError(f"the entry point {point.name!r} of {GROUP} must name a ToolFormat, not {form!r}")
    return form
