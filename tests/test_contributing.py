"""CONTRIBUTING.md is followed as it is written: its Python is run, its contracts pass."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.forked import run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}


def python_in(section: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)


def test_a_drafter_is_added_and_a_store_tested_as_written(tmp_path: Path) -> None:
    names = ("my_drafter.py", "test_my_drafter.py", "test_my_store.py")
    for name, text in zip(names, python_in("Add a drafter") + python_in("Add a store"), strict=True):
        (tmp_path / name).write_text(text)
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = run(["-c", program, "-q", "-p", "no:cacheprovider", "--import-mode=prepend", tmp_path], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_a_tool_format_is_made_as_written() -> None:
    page = (ROOT / "docs" / "reference" / "tool-formats.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## Add a format\n.*?```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, object] = {}
    exec(code, made)
    assert made["ACT"].name == "act"


def test_every_make_command_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", PAGE)) <= targets
