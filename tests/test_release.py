"""`.ci/release.py`, which makes a release: one version in every package and in every pin of one by another."""

from __future__ import annotations

import re
import runpy
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DAY = date(2026, 1, 2)


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    """The names of the program."""
    return runpy.run_path(str(ROOT / ".ci" / "release.py"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files that name a version, with a changelog that holds news: ours holds none on the day of a release."""
    named = ("pyproject.toml", "plugins/*/pyproject.toml", "src/*/__init__.py", "plugins/*/src/*/__init__.py")
    for file in (path for pattern in named for path in ROOT.glob(pattern)):
        (copy := tmp_path / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 7.8.9 (unreleased)\n\nNews.\n\n## 7.8.8 (2026-01-01)\n")
    return tmp_path


def test_every_package_and_every_pin_gets_the_new_version(release: dict[str, Any], root: Path) -> None:
    texts = release["rewritten"](root, "7.8.9", DAY)
    for file in (root / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(texts[file])["project"]
        assert project.get("version", "7.8.9") == "7.8.9", file  # the two without one take it from their module
    assert not [path for path, text in texts.items() if re.search(r"precedent-[^ ]*==(?!7\.8\.9)", text)]
    modules = [text for path, text in texts.items() if path.suffix == ".py"]
    assert len(modules) == 2
    assert all('__version__ = "7.8.9"' in text for text in modules)


def test_the_changelog_is_dated_and_keeps_its_text(release: dict[str, Any], root: Path) -> None:
    dated = release["rewritten"](root, "7.8.9", DAY)[root / "CHANGELOG.md"]
    assert dated == "# Changelog\n\n## 7.8.9 (2026-01-02)\n\nNews.\n\n## 7.8.8 (2026-01-01)\n"


def test_a_changelog_without_news_is_refused(release: dict[str, Any], root: Path) -> None:
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 7.8.8 (2026-01-01)\n")
    with pytest.raises(ValueError, match=r'write what is new under "## 7\.8\.9 \(unreleased\)"'):
        release["rewritten"](root, "7.8.9", DAY)
