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


def test_every_package_and_every_pin_gets_the_new_version(release: dict[str, Any]) -> None:
    texts = release["rewritten"](ROOT, "7.8.9", DAY)
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(texts[file])["project"]
        assert project.get("version", "7.8.9") == "7.8.9", file  # the two without one take it from their module
    assert not [path for path, text in texts.items() if re.search(r"precedent-[^ ]*==(?!7\.8\.9)", text)]
    modules = [text for path, text in texts.items() if path.suffix == ".py"]
    assert len(modules) == 2
    assert all('__version__ = "7.8.9"' in text for text in modules)


def test_the_changelog_is_dated_and_keeps_its_text(release: dict[str, Any]) -> None:
    changelog = ROOT / "CHANGELOG.md"
    before, after = changelog.read_text(encoding="utf-8"), release["rewritten"](ROOT, "7.8.9", DAY)[changelog]
    assert after.startswith("# Changelog\n\n## 7.8.9 (2026-01-02)\n")
    assert after.splitlines()[3:] == before.splitlines()[3:]


def test_a_changelog_without_news_is_refused(release: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "src" / "precedent").mkdir(parents=True)
    (tmp_path / "src" / "precedent" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "pyproject.toml").write_text('version = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-01-01)\n")
    with pytest.raises(ValueError, match=r'write what is new under "## 0\.2\.0 \(unreleased\)"'):
        release["rewritten"](tmp_path, "0.2.0", DAY)
