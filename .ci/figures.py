"""Writes the documentation's tables of figures from the files in `docs/figures`.

    python .ci/figures.py              # writes the tables
    python .ci/figures.py --check      # the exit status is 1 if a page does not show what its files say

A table stands between `<!-- figures NAME -->` and `<!-- end -->`; NAME is one of `figure_tables.TABLES`. `make figures`
measures, and writes the files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from figure_cells import FigureError, Measured, cell, read
from figure_table import Line, Table
from figure_tables import TABLES

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures", "<!-- end -->"
HISTORY = ("decisions", "upstream")
REGION = re.compile(rf"{BEGIN} (?P<name>[\w-]+) -->\n(?P<shown>.*?){END}", re.DOTALL)


@dataclass(frozen=True)
class Site:
    """The pages and the files below a folder."""

    root: Path

    @property
    def files(self) -> list[Measured]:
        """What was measured."""
        return read(self.root / "docs" / "figures")

    @property
    def pages(self) -> list[Path]:
        """README and the pages of today; decisions and other history are not written again."""
        found = sorted((self.root / "docs").rglob("*.md"))
        return [*self.root.glob("README.md"), *(page for page in found if page.parent.name not in HISTORY)]

    @property
    def places(self) -> list[Place]:
        """The tables of all pages. Raises FigureError for a mark that is wrong."""
        return [place for page in self.pages for place in places(page, page.relative_to(self.root).as_posix())]


@dataclass(frozen=True)
class Place:
    """The place of a table on a page."""

    page: str
    name: str
    shown: str

    @property
    def table(self) -> Table:
        """What is shown there."""
        if self.name not in TABLES:
            raise FigureError(f"{self.page}: there is no table {self.name!r} in .ci/figure_tables.py")
        return TABLES[self.name]

    def text(self, files: Sequence[Measured]) -> str:
        """What has to stand there."""
        try:
            return f"\n{written(self.table, files)}\n\n"
        except FigureError as error:
            raise FigureError(f"{self.page}: table {self.name!r}: {error}") from error


def places(page: Path, name: str) -> Iterator[Place]:
    """The tables on a page."""
    text = page.read_text(encoding="utf-8")
    found = [Place(name, match["name"], match["shown"]) for match in REGION.finditer(text)]
    if len(found) != text.count(BEGIN) or any(BEGIN in place.shown for place in found):
        raise FigureError(f"{name}: a table does not begin with '{BEGIN} NAME -->' or lacks its '{END}'")
    yield from found


def written(table: Table, files: Sequence[Measured]) -> str:
    """A table with its source below, or a sentence with its source in brackets."""
    used = {one.file: one for line in table.lines for one in matching(line.file, files)}
    rows = [row for line in table.lines for one in matching(line.file, files) for row in rows_of(line, one)]
    said = source(used.values(), "".join(form for line in table.lines for form in line.cells))
    if not table.heads:
        return f"{'. '.join(text for (text,) in rows)} ({said})."
    lines = [_row(table.heads), "|" + "---|" * len(table.heads), *map(_row, rows)]
    return "\n".join(lines) + (f"\n\n{said}." if said else "")


def matching(pattern: str, files: Sequence[Measured]) -> list[Measured]:
    """The files of one measurement: one, or one for each machine where the name ends with `*`."""
    found = [one for one in files if fnmatch(one.file, pattern)]
    if not found:
        raise FigureError(f"there is no docs/figures/{pattern}.json: write it with make figures")
    return found


def rows_of(line: Line, one: Measured) -> list[list[str]]:
    """The cells that a line makes of a file; a FigureError if the file lacks what the line shows."""
    try:
        return [[cell(form, part) for form in line.cells] for part in one.parts(line.each)]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FigureError(f"docs/figures/{one.file}.json lacks what it shows ({error!r})") from error


def check(one: Measured) -> None:
    """Raise FigureError if a file lacks what its tables show."""
    for line in (line for table in TABLES.values() for line in table.lines if fnmatch(one.file, line.file)):
        rows_of(line, one)


def source(used: Iterable[Measured], cells: str) -> str:
    """Commands, dates and machines, each mentioned once, and not if the cells themselves say them."""
    told = list(used)
    commands = [] if "{command}" in cells else [f"`{one.command}`" for one in told]
    places = [] if "{label}" in cells else [one.place for one in told]
    said = (" and ".join(filter(None, dict.fromkeys(each))) for each in (commands, [one.date for one in told], places))
    return ", ".join(filter(None, said))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def wrong(site: Site) -> list[str]:
    """What is not as it has to be: tables that differ from their files, and files that no page shows."""
    files, found = site.files, site.places
    differing = [place for place in found if place.text(files) != place.shown]
    patterns = {line.file for place in found for line in place.table.lines}
    unused = [one.file for one in files if not any(fnmatch(one.file, pattern) for pattern in patterns)]
    return [
        *(f"{place.page}: {place.name!r} is not what docs/figures says: run make reference" for place in differing),
        *(f"no page shows docs/figures/{file}.json" for file in unused),
    ]


def write(site: Site) -> None:
    """Write all tables, or none if one cannot be made."""
    files = site.files
    for place, shown in [(place, place.text(files)) for place in site.places]:
        page = site.root / place.page
        mark, text = f"{BEGIN} {place.name} -->\n", page.read_text(encoding="utf-8")
        page.write_text(text.replace(f"{mark}{place.shown}{END}", f"{mark}{shown}{END}"), encoding="utf-8")


def main(arguments: Sequence[str], site: Site = Site(ROOT)) -> int:
    """Write, or say what is wrong; returns the exit status."""
    try:
        if "--check" not in arguments:
            write(site)
        found = wrong(site)
    except FigureError as error:
        found = [str(error)]
    print("\n".join(found) or "ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
