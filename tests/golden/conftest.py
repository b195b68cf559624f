"""Golden files: results that must not change, recorded as JSON beside the tests.

To change them on purpose, run `pytest -n0 tests/golden --golden-write` and review the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
WRITE = "--golden-write"
WIDTH = 120

Golden = Callable[[str, Any], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(WRITE, action="store_true", help="record the golden files instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a value with the golden file of a name, or record it if asked to."""

    def compare(name: str, value: Any) -> None:
        path, found = FOLDER / f"{name}.json", _text(json.loads(json.dumps(value))) + "\n"
        if request.config.getoption(WRITE, False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(found, encoding="utf-8")
            return
        lines = (text.splitlines() for text in (path.read_text(encoding="utf-8"), found))
        differing = list(unified_diff(*lines, "recorded", "found", n=1, lineterm=""))
        assert not differing, "\n".join([f"{name} is not as recorded (see {WRITE}):", *differing[:60]])

    return compare


def _text(value: Any, indent: str = "") -> str:
    """JSON with short values on one line, so that files stay small and differences readable."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= WIDTH:
        return line
    inner = indent + " "
    if isinstance(value, list):
        if not any(isinstance(one, dict | list) for one in value):
            return line
        return "[\n" + ",\n".join(inner + _text(one, inner) for one in value) + f"\n{indent}]"
    parts = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {_text(one, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
