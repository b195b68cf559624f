"""The surface of the library: what is public, and what the docs name."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import precedent
from precedent import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "precedent"


def test_public_names_are_there_sorted_and_listed() -> None:
    assert [name for name in (*precedent.__all__, *precedent.PLUGINS) if getattr(precedent, name) is None] == []
    assert sorted(precedent.__all__) == precedent.__all__
    assert set(dir(precedent)) == {*precedent.__all__, *precedent.PLUGINS}


def test_every_error_is_public() -> None:
    defined = {
        name for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__
    }
    assert defined <= set(precedent.__all__)


def test_the_version_is_that_of_the_distribution_and_of_the_changelog() -> None:
    assert importlib.metadata.version("precedent-llm") == precedent.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE).group(1) == precedent.__version__


@pytest.mark.parametrize("page", ["explanation/journey.md", "reference/glossary.md", "explanation/planning.md"])
def test_the_docs_name_only_files_that_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+(?:\.py|\.jinja|/))`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    assert named
