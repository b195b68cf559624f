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

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

sys.path.insert(0, str(ROOT / ".ci"))
try:
    figures, recording, reference = map(importlib.import_module, ("figures", "recording", "reference"))
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

NO_MODULES = {*reference.ENTRY_POINTS, "precedent.speculation"}
"""Groups of entry points, and what attributes of spans begin with."""


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
    assert [name for name in sorted(named - NO_MODULES) if not is_there(name)] == []
    tests = re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)(?:::(\w+))?", text)
    assert [one for one in tests if not re.search(rf"(def|class) {one[1]}\b", sources_by_file().get(one[0], ""))] == []
    programs = re.findall(r"(?:python |^|`)((?:tests|examples|plugins)/[\w/.-]+\.(?:py|sh|ipynb))", text)
    assert [name for name in programs if not (ROOT / name).exists()] == []


def test_nothing_on_a_page_says_where_it_was_current() -> None:
    """No path of a machine, no name of a registry's host."""
    wrong = re.compile(rf"{re.escape(str(ROOT))}|/work/|/home/\w|{os.sep}root{os.sep}")
    assert [name_of(page) for page in ALL if wrong.search(page.read_text(encoding="utf-8"))] == []


def test_the_figures_are_those_of_their_files() -> None:
    assert list(figures.written(ROOT, check=True)) == [], "run make reference"


def test_the_terminal_s_picture_plays_its_recording() -> None:
    cast = (DOCS / "images" / "recording.cast").read_text(encoding="utf-8")
    recorded = recording.Recording.of(cast)
    assert recorded.pieces[-1][0] <= recording.LONGEST
    assert (DOCS / "images" / "recording.svg").read_text(encoding="utf-8") == recorded.as_svg()


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


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.enable_socket
@pytest.mark.filterwarnings("ignore")  # of the kernel's own transport
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="the group `docs` is not installed")
    monkeypatch.syspath_prepend(ROOT / ".ci")
    done = importlib.import_module("notebook").executed(ROOT / "examples" / "one_step.ipynb", tmp_path)
    shown = json.dumps([output for cell in done.cells for output in cell.get("outputs", ())])
    assert "and the target's own token" in shown
    assert "background: #a7dfbb" in shown  # recalled
    assert "written [0.2" in shown
