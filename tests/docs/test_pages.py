"""The pages: links lead somewhere, names are there, none is too long, the reference says what the code says."""

from __future__ import annotations

import importlib
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
HISTORY = ("decisions", "upstream")
GENERATED = ("settings.md", "command-line.md", "metrics.md", "errors.md")
PAGES = sorted(DOCS.rglob("*.md"))
ALL = [
    *PAGES,
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("examples/*.md")),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_generated(page: Path) -> bool:
    return page.parent.name == "python" or (page.parent.name == "reference" and page.name in GENERATED)


def written() -> list[Path]:
    """The pages that people wrote, and that say what is true today."""
    return [page for page in PAGES if not is_generated(page) and page.parent.name not in HISTORY]


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    kept = (one for one in text if one in "-_ " or unicodedata.category(one)[0] in "LN")
    return "".join(kept).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


def broken(page: Path) -> Iterator[str]:
    """Links of a page to files or headings that are not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_and_a_missing_anchor_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading, `code`\n\n[here](#a-heading-code) [no](gone.md) [nor](#there) ![nor](x.png)\n")
    assert list(broken(page)) == ["gone.md", "#there", "x.png"]


@pytest.mark.parametrize("page", written(), ids=name_of)
def test_a_page_begins_with_what_a_reader_can_do(page: Path) -> None:
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    assert title.startswith("# ")
    assert not rest.startswith(("#", "|", "!", "- ", "```")), "begin with a sentence"


def test_every_page_is_in_the_contents_of_its_part() -> None:
    for folder in {page.parent for page in written()} - {DOCS}:
        listed = set(re.findall(r"\]\(([\w.-]+\.md)\)", (folder / "index.md").read_text(encoding="utf-8")))
        assert {page.name for page in folder.glob("*.md")} - {"index.md"} == listed, folder


@pytest.mark.parametrize("page", written(), ids=name_of)
def test_every_name_of_ours_is_there(page: Path) -> None:
    """Dotted names, in prose and in imports."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`(precedent(?!\.sqlite)(?:\.\w+)+)", text))
    for module, names in re.findall(r"^from (precedent[\w.]*) import (.+)$", text, re.MULTILINE):
        named |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    assert [name for name in sorted(named - ENTRY_POINTS) if not is_there(name)] == []


ENTRY_POINTS = {f"precedent.{group}" for group in ("drafters", "judges", "stores", "tool_formats", "speculation")}


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
def files_by_name() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in ROOT.rglob("test_*.py"):
        if not {".venv", ".venv-vllm", ".venv-llama-cpp", ".venv-clients"} & set(path.parts):
            files.setdefault(path.name, []).append(path)
    return files


@pytest.mark.parametrize("page", written(), ids=name_of)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    missing = []
    for file, test in re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
        sources = [path.read_text(encoding="utf-8") for path in files_by_name().get(file, ())]
        if not any(f"def {test}" in source or f"class {test}" in source for source in sources):
            missing.append(f"{file}::{test}")
    assert missing == []


@pytest.mark.parametrize("page", written(), ids=name_of)
def test_every_program_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(
        r"(?:python |^|`)((?:tests|examples|plugins)/[\w/.-]+\.(?:py|sh|ipynb))", page.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_reference_says_what_the_code_says() -> None:
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        reference = importlib.import_module("reference")
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    assert reference.stale() == [], "run make reference"


def test_nothing_on_a_page_says_where_it_was_written() -> None:
    """No path of a machine, no name of a registry's host."""
    wrong = re.compile(rf"{re.escape(str(ROOT))}|/work/|/home/\w|{os.sep}root{os.sep}")
    assert [name_of(page) for page in ALL if wrong.search(page.read_text(encoding="utf-8"))] == []
