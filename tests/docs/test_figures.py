"""Figures on pages are those of their files: what differs is seen, and a cell says no more than its file."""

from __future__ import annotations

import importlib
import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / ".ci"))
try:
    figures, commands, tables, table, cells = map(
        importlib.import_module, ("figures", "figure_commands", "figure_tables", "figure_table", "figure_cells")
    )
finally:
    sys.path.pop(0)

PAGE = """# A page

Before. <!-- a comment -->

<!-- figures rows -->

| typed | by hand |

<!-- end -->

After.
"""
DAY = "2026-11-24"
WIDTHS = (1, 4, 8, 16, 32, 48)
AVX512 = {"class": "avx512", "instructions": "AVX-512", "cores": 2}
LIMITED = {"class": "avx2", "instructions": "AVX2", "limited": True, "cores": 2}
SITE = figures.Site(ROOT)


def measured(**changed: Any) -> dict[str, Any]:
    """A file of steps by their rows."""
    steps = {str(width): {"together": 10.04 + width} for width in WIDTHS}
    found = {"command": "python bench.py", "date": DAY, "machine": AVX512, "figures": {"steps": steps}}
    return found | {"source": "measured"} | changed


class Folder:
    """A site of one page."""

    def __init__(self, root: Path, page: str = PAGE) -> None:
        self.page, self.figures = root / "docs" / "page.md", root / "docs" / "figures"
        self.figures.mkdir(parents=True)
        self.page.write_text(page, encoding="utf-8")
        self.site = figures.Site(root)

    def add(self, name: str = "rows-avx512", **changed: Any) -> Path:
        file = self.figures / f"{name}.json"
        file.write_text(json.dumps(measured(**changed)), encoding="utf-8")
        return file

    def shown(self) -> str:
        return self.page.read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_pages_show_what_the_files_say() -> None:
    assert figures.wrong(SITE) == [], "run make reference"


def test_a_table_comes_from_its_file_and_the_rest_of_the_page_stays(folder: Folder) -> None:
    folder.add()
    figures.write(folder.site)
    before, after = folder.shown().split("\n<!-- figures rows -->\n")[0], folder.shown().split("<!-- end -->\n")[1]
    assert (before, after) == ("# A page\n\nBefore. <!-- a comment -->\n", "\nAfter.\n")
    assert "\n| AVX-512 | 11.0 | 14.0 | 18.0 | 26.0 | 42.0 | 58.0 |\n" in folder.shown()
    assert "\n`python bench.py`, 2026-11-24.\n" in folder.shown()
    assert "by hand" not in folder.shown()
    assert figures.wrong(folder.site) == []


def test_every_machine_has_a_row_the_best_first(folder: Folder) -> None:
    folder.add("rows-avx2-limited", machine=LIMITED)
    folder.add("rows-avx512")
    folder.add("rows-avx512-busy", machine=AVX512 | {"load_before": 1.5})
    figures.write(folder.site)
    labels = re.findall(r"^\| (AVX[^|]*) \|", folder.shown(), re.MULTILINE)
    assert labels == ["AVX-512", "AVX-512, beside other programs (load 1.5)", "AVX2, limited"]


def test_a_changed_file_is_seen(folder: Folder) -> None:
    folder.add()
    figures.write(folder.site)
    folder.add(date="2026-11-25")
    assert figures.wrong(folder.site) == ["docs/page.md: 'rows' is not what docs/figures says: run make reference"]


def test_a_changed_page_is_seen_and_written_again(folder: Folder) -> None:
    folder.add()
    figures.write(folder.site)
    folder.page.write_text(folder.shown().replace("| 26.0 |", "| 16.0 |"))
    assert figures.main(["--check"], folder.site) == 1
    assert "| 16.0 |" in folder.shown()
    assert figures.main([], folder.site) == 0
    assert "| 26.0 |" in folder.shown()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("figures rows", "figures lines", "no table 'lines'"), ("<!-- end -->", "", "lacks its '<!-- end -->'"),
     ("rows -->", "rows", "does not begin with")],
)  # fmt: skip
def test_a_wrong_mark_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    folder = Folder(tmp_path, PAGE.replace(old, new))
    folder.add()
    with pytest.raises(figures.FigureError, match=re.escape(said)):
        figures.wrong(folder.site)
    assert figures.main(["--check"], folder.site) == 1


def test_a_file_that_no_page_shows_is_seen(folder: Folder) -> None:
    folder.add()
    figures.write(folder.site)
    folder.add("grammar")
    assert figures.wrong(folder.site) == ["no page shows docs/figures/grammar.json"]


def test_a_table_without_its_file_is_refused(folder: Folder) -> None:
    with pytest.raises(figures.FigureError, match=r"table 'rows': there is no docs/figures/rows-\*\.json"):
        figures.wrong(folder.site)


def test_what_is_no_file_of_figures_is_refused(folder: Folder) -> None:
    file = folder.add()
    for text in ("{", "{}", '{"rows": 1}'):
        file.write_text(text)
        with pytest.raises(figures.FigureError, match=r"rows-avx512\.json is not a file of figures"):
            figures.wrong(folder.site)


def test_a_file_without_what_the_table_shows_is_named_and_no_page_is_changed(folder: Folder) -> None:
    folder.add(figures={"steps": {"1": {"together": 2.0}}})
    with pytest.raises(figures.FigureError, match=r"rows-avx512\.json lacks what it shows \(KeyError\('4'\)\)"):
        figures.write(folder.site)
    assert folder.shown() == PAGE


FOUND = {
    "ratio": 0.391,
    "exact": 1500,
    "typed": "3.4",
    "null": None,
    "runs": [{"name": "both", "speed": 2.5}, {"way": "alone", "speed": 1.5}],
    "by_minute": [{"minute": 4, "mb": 900}, {"minute": 20, "mb": 1234}],
    "pair": [3, 4],
}


@pytest.mark.parametrize(
    ("form", "text"),
    [("{ratio:.2f}", "0.39"), ("{exact:,}", "1,500"), ("{ratio!c:+.2g} %", "−61 %"), ("{exact!k:.1f} s", "1.5 s"),
     ("{typed:.2f}x", "3.4x"), ("{typed!k:.2f}", "3.4"), ("{ratio:.2f} / {null:.2f}", ""), ("{null[a][0]}", ""),
     ("{runs[both][speed]}, {runs[alone][speed]}", "2.5, 1.5"), ("{by_minute[20][mb]!m}", "1.2 GB"),
     ("{by_minute[4][mb]!m}", "900 MB"), ("{pair[0]} of {pair[1]}", "3 of 4"),
     ("{label}: `{command}`", "AVX-512: `bench.py`")],
)  # fmt: skip
def test_a_cell_is_what_its_format_says(form: str, text: str) -> None:
    one = cells.Measured("name", "python tests/benchmarks/bench.py", DAY, AVX512, FOUND, "measured")
    assert cells.cell(form, one) == text


@pytest.mark.parametrize("form", ["{absent}", "{runs[absent]}", "{pair[2]}"])
def test_a_format_of_what_is_not_there_fails(form: str) -> None:
    with pytest.raises((KeyError, IndexError, ValueError)):
        cells.cell(form, cells.Measured("name", "command", DAY, AVX512, FOUND, "measured"))


def test_a_sentence_has_its_source_in_brackets() -> None:
    machine = {"processor": "A", "instructions": "B", "cores": 2}
    one = cells.Measured("speed", "bench", DAY, machine, {"x": 2}, "measured")
    two = cells.Measured("more", "bench", "2026-11-25", {"processor": "", "instructions": "C"}, {"x": 3}, "measured")
    lines = (table.Line("speed", ("It is {x}",)), table.Line("more", ("Or {x}",)))
    said = "It is 2. Or 3 (`bench`, 2026-11-24 and 2026-11-25, A (B), 2 cores and C)."
    assert figures.written(table.Table((), lines), [one, two]) == said


def test_every_file_was_written_by_a_command() -> None:
    for one in SITE.files:
        assert one.source == "measured", one.file
        assert one.command, one.file
        assert one.machine["instructions"], one.file
        assert "load_before" in one.machine, one.file


def test_every_table_has_a_page_and_every_file_a_command() -> None:
    assert {place.name for place in SITE.places} == set(tables.TABLES)
    patterns = {name + "-*" * command.by_machine for name, command in commands.COMMANDS.items()}
    shown = {line.file for one in tables.TABLES.values() for line in one.lines}
    assert patterns <= shown
    assert [file for file in shown if not any(fnmatch(file, pattern) for pattern in patterns)] == []


def test_every_program_that_measures_is_there() -> None:
    named = [command.words.split()[0] for command in commands.COMMANDS.values()]
    others = [name for name in named if name not in ("precedent", "python")]
    assert [name for name in others if not (ROOT / name).is_file()] == []
