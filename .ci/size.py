"""Counts the project by package: files, lines after `ruff format`, statements, and words of pages.

    python .ci/size.py [--json]

Blank lines and docstrings are lines. Plugins' tests count as tests.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUFF = Path(sys.executable).with_name("ruff")
PROGRAMS = ("src/**/*.py", "plugins/**/*.py", "tests/**/*.py", "benchmarks/**/*.py", "benchmarks/**/*.sh")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "plugins/**/*.md", "examples/**/*.md")
TOTALS = {
    "src/precedent": ("lines", ("src/precedent",), 21_000),
    "src and plugins": ("lines", ("src/precedent", "plugins"), 54_000),
    "tests": ("lines", ("tests",), 38_000),
    "benchmarks": ("lines", ("benchmarks",), 2_500),
    "pages": ("words", ("pages",), 40_000),
}
"""What is added up, over which parts, and the most that it should be."""


def output(*command: str | Path) -> str:
    """Run a command that may fail; returns what it prints."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def listed(*patterns: str) -> list[str]:
    """List the files of the working tree that match, ignored ones excluded."""
    found = output("git", "ls-files", "-co", "--exclude-standard", *(f":(glob){pattern}" for pattern in patterns))
    return [name for name in found.splitlines() if (ROOT / name).is_file()]


def place(name: str) -> tuple[str, str]:
    """Return the part of the project to which a program belongs, and the package or folder in it."""
    parts = Path(name).parts
    if parts[0] == "plugins":
        return ("tests" if "tests" in parts[2:] else "plugins"), parts[1]
    depth = 2 if parts[0] == "src" else 1
    return "/".join(parts[:depth]), parts[depth] if len(parts) > depth + 1 else "."


def sizes() -> dict[tuple[str, str], dict[str, int]]:
    """Count every package, and the pages of every folder."""
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(
        lambda: {"files": 0, "lines": 0, "statements": 0, "words": 0}
    )
    programs = listed(*PROGRAMS)
    differing = output(RUFF, "format", "--check", *(name for name in programs if name.endswith(".py")))
    unformatted = {line.removeprefix("Would reformat: ") for line in differing.splitlines()}
    for name in programs:
        text, size = (ROOT / name).read_text(encoding="utf-8"), found[place(name)]
        if name in unformatted:
            done = subprocess.run(
                [RUFF, "format", "-"], cwd=ROOT, input=text, capture_output=True, text=True, check=True
            )
            text = done.stdout
        size["files"] += 1
        size["lines"] += len(text.splitlines())
        if name.endswith(".py"):
            size["statements"] += sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    for name in listed(*PAGES):
        size = found["pages", "/".join(Path(name).parts[:-1][:2]) or "."]
        size["files"] += 1
        size["words"] += len((ROOT / name).read_text(encoding="utf-8").split())
    return dict(sorted(found.items()))


def totals(found: dict[tuple[str, str], dict[str, int]]) -> list[dict[str, Any]]:
    """Add up what has a cap."""
    return [
        {"total": name, unit: sum(size[unit] for (part, _), size in found.items() if part in parts), "cap": cap}
        for name, (unit, parts, cap) in TOTALS.items()
    ]


if __name__ == "__main__":
    counted = sizes()
    rows = [{"part": part, "package": package} | size for (part, package), size in counted.items()]
    if "--json" in sys.argv:
        print(json.dumps({"packages": rows, "totals": totals(counted)}, indent=1))
    else:
        for row in rows:
            print(f"{row['part']:14} {row['package']:24}" + "".join(f"{row[unit]:9,} {unit}" for unit in list(row)[2:]))
        for row in totals(counted):
            _, (unit, value), (_, cap) = row.items()
            print(f"{row['total']:39}{value:9,} {unit}, at most {cap:,}")
