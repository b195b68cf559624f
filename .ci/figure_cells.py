"""One file of `docs/figures`, and how a format such as `{steps[16][together]:.1f}` makes a cell of a table of it."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

CLASSES = ("amx", "avx512-bf16", "avx512", "avx2")
"""Of processors, best first: the order of a table's rows."""

QUIET = 0.75
"""Load before a measurement, at and below which a page does not mention other programs."""

NAMES = ("name", "mode", "way", "without", "rows", "minute", "completions")
"""Keys by which a format finds an element of a list: `{runs[both]}` is the run whose name is `both`."""


class FigureError(Exception):
    """A file, a page or a name that is wrong; says what to do."""


@dataclass(frozen=True)
class Measured:
    """One file: what a command found, when and where."""

    file: str
    command: str
    date: str
    machine: Mapping[str, Any]
    figures: Any
    source: str

    @property
    def rank(self) -> tuple[int, str]:
        """The best machine first."""
        kind = self.machine.get("class")
        return CLASSES.index(kind) if kind in CLASSES else len(CLASSES), self.file

    @property
    def remark(self) -> str:
        """What else has to be known of the machine: a lesser one's kernels, other programs."""
        load = self.machine.get("load_before") or 0.0
        parts = ["limited"] if self.machine.get("limited") else []
        parts += [f"beside other programs (load {load:g})"] if load > QUIET else []
        return "".join(f", {part}" for part in [*parts, *self.machine.get("remarks", ())])

    @property
    def label(self) -> str:
        """The machine, in a table of several."""
        return f"{self.machine['instructions']}{self.remark}"

    @property
    def place(self) -> str:
        """The machine below a table."""
        processor, kind, cores = (self.machine.get(name) for name in ("processor", "instructions", "cores"))
        said = f"{processor} ({kind})" if processor else kind
        return f"{said}{f', {cores} cores' if cores else ''}{self.remark}"

    def at(self, path: str) -> Any:
        """What stands at a path."""
        return reduce(at, re.findall(r"[^\[\]]+", path), self.figures)

    def parts(self, each: str) -> Iterator[Measured]:
        """One for every element of a list in the figures, such as `sizes` or `runs[both]`; itself without a list."""
        for one in self.at(each) if each else [self.figures]:
            yield replace(self, figures=one)


def read(folder: Path) -> list[Measured]:
    """All files of a folder, the best machines first. Raises FigureError for one that is not a file of figures."""
    return sorted(map(read_one, folder.glob("*.json")), key=lambda one: one.rank)


def read_one(path: Path) -> Measured:
    """One file."""
    try:
        found = Measured(path.stem, **json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise FigureError(f"{path.name} is not a file of figures ({error}): write it with make figures") from error
    return found


def at(found: Any, key: str) -> Any:
    """An element of a mapping by its key, of a list by its name or its number; None of what was not measured."""
    if found is None or isinstance(found, Mapping):
        return None if found is None else found[key]
    named = [one for one in found if isinstance(one, Mapping) and key in (str(one.get(name)) for name in NAMES)]
    return named[0] if named else found[int(key)]


class NotMeasured(Exception):
    """A null."""


class Cell(string.Formatter):
    """Formats with `{path[to][a figure]:.1f}`, `{label}` and `{command}`.

    A text in place of a number is shown as it is, and a cell with a null is empty. Conversions: `!c` is the change
    in percent that a ratio is, `!k` a thousandth (milliseconds of microseconds), `!m` megabytes with their unit.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """What stands at a path."""
        one = args[0]
        if field_name in ("label", "command"):
            return getattr(one, field_name).removeprefix("python tests/benchmarks/"), field_name
        return one.at(field_name), field_name

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        """The conversions, of numbers alone."""
        if value is None:
            raise NotMeasured
        if conversion is None or isinstance(value, str):
            return value
        size = f"{value:.0f} MB" if value < 1000 else f"{value / 1000:.1f} GB"
        return {"c": 100 * (value - 1), "k": value / 1000, "m": size}[conversion]

    def format_field(self, value: Any, format_spec: str) -> str:
        """A number by its format, with a true minus."""
        text = value if isinstance(value, str) else format(value, format_spec)
        return text.replace("-", "−") if text[:1] == "-" else text


def cell(form: str, one: Measured) -> str:
    """A cell of a table, or a sentence."""
    try:
        return Cell().format(form, one)
    except NotMeasured:
        return ""
