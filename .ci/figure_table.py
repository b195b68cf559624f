"""What a table of figures is: lines of cells, each a format (`figure_cells.Cell`) of what a command wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A row of each file whose name matches `file`, or of each element of the list `each` in it."""

    file: str
    cells: tuple[str, ...]
    each: str = ""


@dataclass(frozen=True)
class Table:
    """Lines below headings; a sentence without headings."""

    heads: tuple[str, ...]
    lines: tuple[Line, ...]


def rows(file: str, columns: Mapping[str, str], each: str = "") -> Table:
    """Formats by their headings: a row for each element of a list, or for each machine (`file` ends with `*`)."""
    return Table(tuple(columns), (Line(file, tuple(columns.values()), each),))


def named(file: str, heads: tuple[str, ...], labels: Mapping[str, str], *cells: str) -> Table:
    """A row for each name, which stands for `%s` in the cells, behind the words that a page has for it."""
    made = ((label, *(form.replace("%s", name) for form in cells)) for name, label in labels.items())
    return lines(file, heads, made)


def lines(file: str, heads: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> Table:
    """Rows that are said one by one."""
    return Table(heads, tuple(Line(file, row) for row in cells))


def sentence(file: str, text: str) -> Table:
    """Figures in words."""
    return Table((), (Line(file, (text,)),))
