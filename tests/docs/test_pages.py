"""Pages are true: links lead somewhere, names exist, examples and the notebook run, figures are of their files."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

sys.path.insert(0, str(ROOT / ".ci"))
try:
    reference = importlib.import_module("reference")
finally:
    sys.path.remove(str(ROOT / ".ci"))

GENERATED = {DOCS / "reference" / page: text for page, text in reference.pages().items()}
"""Pages that `make docs` writes; they are not kept in git."""
PAGES = sorted(page for page in DOCS.rglob("*.md") if page not in GENERATED)
ALL = [
    *PAGES,
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("examples/*.md")),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    text = GENERATED.get(page) or page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    kept = (one for one in text if one in "-_ " or unicodedata.category(one)[0] in "LN")
    return "".join(kept).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


def broken(page: Path) -> Iterator[str]:
    """Links of a page to files or headings that are not there. Pages outside the site cannot link to generated ones."""
    in_site = page.is_relative_to(DOCS)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        exists = in_site if file in GENERATED else file.exists()
        if not exists or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", [*ALL, *GENERATED], ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_and_a_missing_anchor_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading, `code`\n\n[here](#a-heading-code) [no](gone.md) [nor](#there) ![nor](x.png)\n")
    assert list(broken(page)) == ["gone.md", "#there", "x.png"]


CURRENT = [page for page in PAGES if page.parent.name != "decisions"]
"""The pages that describe the present version."""

GROUPS = ("commands", "drafters", "judges", "loops", "models", "modes", "stores", "tool_formats")
ENTRY_POINTS = {f"precedent.{group}" for group in (*GROUPS, "speculation")}


def is_there(name: str) -> bool:
    """A module, or a name in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@cache
def sources_by_file() -> dict[str, str]:
    """The text of the test files of each name."""
    files: dict[str, str] = {}
    for path in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")):
        files[path.name] = files.get(path.name, "") + path.read_text(encoding="utf-8")
    return files


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_a_page_names_only_what_there_is(page: Path) -> None:
    """Dotted names, in prose and in imports; tests; and programs."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`(precedent(?!\.sqlite)(?:\.\w+)+)", text))
    for module, names in re.findall(r"^from (precedent[\w.]*) import (.+)$", text, re.MULTILINE):
        named |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    assert [name for name in sorted(named - ENTRY_POINTS) if not is_there(name)] == []
    tests = re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)(?:::(\w+))?", text)
    assert [one for one in tests if not re.search(rf"(def|class) {one[1]}\b", sources_by_file().get(one[0], ""))] == []
    programs = re.findall(r"(?:python |^|`)((?:tests|examples|plugins)/[\w/.-]+\.(?:py|sh|ipynb))", text)
    assert [name for name in programs if not (ROOT / name).exists()] == []


def test_nothing_on_a_page_says_where_it_was_current() -> None:
    """No path of a machine, no name of a registry's host."""
    wrong = re.compile(rf"{re.escape(str(ROOT))}|/work/|/home/\w|{os.sep}root{os.sep}")
    assert [name_of(page) for page in ALL if wrong.search(page.read_text(encoding="utf-8"))] == []


# Examples in docstrings are run

MODULES = (
    "precedent.cache.speculation_cache",
    "precedent.cache.redaction",
    "precedent.cache.store_url",
    "precedent.config",
    "precedent_generate.hook",
    "precedent.engine.engine",
    "precedent.grammar.spec",
    "precedent.langchain.chat_model",
    "precedent_replay.recorder",
    "precedent.text.templates",
    "precedent.verify",
)
"""Where the examples are."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert done.attempted > 0
    assert done.failed == 0


# The notebook runs from its first cell to its last, and says what it says

NOTEBOOK = ROOT / "examples" / "one_step.ipynb"


def outputs_of(cells: list[Any]) -> str:
    return json.dumps([output for cell in cells for output in cell.get("outputs", ())])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.enable_socket
@pytest.mark.filterwarnings("ignore")  # of the kernel's own transport
def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="the group `docs` is not installed")
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        done = importlib.import_module("notebook").executed(NOTEBOOK, tmp_path)
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    shown = outputs_of(done.cells)
    assert "and the target's own token" in shown
    assert "background: #a7dfbb" in shown  # recalled
    assert "written [0.2" in shown


# Figures on pages are those of their files


sys.path[:0] = [str(ROOT / ".ci"), str(ROOT / "benchmarks")]
try:
    figures, measure, measuring = map(importlib.import_module, ("figures", "measure", "measuring"))
finally:
    del sys.path[:2]

PAGE = "Before.\n\n<!-- figures rows -->\n| typed | by hand |\n<!-- end -->\n\nAfter.\n"
AVX512 = {"class": "avx512", "processor": "A", "instructions": "AVX-512", "cores": 2, "load_before": 0.1}
AVX2 = AVX512 | {"class": "avx2", "instructions": "AVX2", "limited": True}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def add(site: Path, name: str = "rows-avx512", machine: Any = AVX512, widths: Any = (1, 4, 8, 16, 32, 48)) -> None:
    steps = {str(width): {"together": 10.04 + width} for width in widths}
    found = {"source": "measured", "command": "python benchmarks/bench.py", "date": "2026-11-24", "machine": machine}
    text = json.dumps(found | {"figures": {"steps": steps}})
    (site / "docs" / "figures" / f"{name}.json").write_text(text, encoding="utf-8")


def shown(site: Path) -> str:
    return (site / "docs" / "page.md").read_text(encoding="utf-8")


def test_the_pages_show_what_the_files_say() -> None:
    assert list(figures.written(ROOT, check=True)) == [], "run make reference"


def test_a_table_comes_from_its_files_and_the_rest_of_the_page_stays(site: Path) -> None:
    add(site, "rows-avx2-limited", AVX2)
    add(site)
    assert len(list(figures.written(site, check=True))) == 1
    assert shown(site) == PAGE, "checking changes nothing"
    assert list(figures.written(site, check=False)) == list(figures.written(site, check=True)) == []
    assert shown(site).startswith("Before.\n\n<!-- figures rows -->\n")
    assert shown(site).endswith("<!-- end -->\n\nAfter.\n")
    rows = re.findall(r"^\| AVX.*\|$", shown(site), re.MULTILINE)
    assert rows == [f"| {kind} | 11.0 | 14.0 | 18.0 | 26.0 | 42.0 | 58.0 |" for kind in ("AVX-512", "AVX2, limited")]
    assert "\n\n`python benchmarks/bench.py`, 2026-11-24.\n" in shown(site)


def test_what_a_table_lacks_is_named_and_no_page_is_changed(site: Path) -> None:
    with pytest.raises(SystemExit, match=r"no docs/figures/rows-\*\.json"):
        list(figures.written(site, check=False))
    add(site, widths=(1,))
    with pytest.raises(SystemExit, match=r"lacks 'rows' or a part \(KeyError\('4'\)\)"):
        list(figures.written(site, check=False))
    assert shown(site) == PAGE


def test_every_file_has_a_command_and_every_command_a_file_and_a_program() -> None:
    found = {path.stem.split("-a")[0] if path.stem.split("-a")[0] in measure.BY_MACHINE else path.stem: path
             for path in (ROOT / "docs" / "figures").glob("*.json")}  # fmt: skip
    assert set(found) == set(measure.COMMANDS)
    programs = {command.split()[0] for command in measure.COMMANDS.values()} - {"precedent", "python"}
    assert [name for name in programs if not (ROOT / "benchmarks" / name).is_file()] == []


def test_a_measurement_is_kept_with_command_date_and_machine(tmp_path: Path) -> None:
    given = [str(ROOT / "benchmarks" / "bench_rows.py"), "--traces", __file__, "--json", "out.json", "--json=out.json"]
    typed = measuring.typed(given, {"PRECEDENT_CPU_KERNELS": "avx2"})
    assert re.fullmatch(r"PRECEDENT_CPU_KERNELS=avx2 \S*python benchmarks/bench_rows.py --traces test_pages.py", typed)
    measuring.Measurement(typed).write(tmp_path / "out.json", {"value": 1 / 3, "none": float("inf")})
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["figures"] == {"value": 0.3333, "none": None}
    assert found["command"] == typed
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["machine"].items() >= measuring.machine_of().items()
