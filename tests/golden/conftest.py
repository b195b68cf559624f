"""Golden files: results that must not change, recorded as JSON beside the tests.

To change them on purpose, run `pytest -n0 tests/golden --golden-write` and review the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
        path, found = FOLDER / f"{name}.json", json.loads(json.dumps(value))
        if request.config.getoption(WRITE, False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(_text(found) + "\n", encoding="utf-8")
            return
        expected = json.loads(path.read_text(encoding="utf-8"))
        differing = list(differences(expected, found))
        assert not differing, "\n".join([f"{name} is not as recorded (see {WRITE}):", *differing[:20]])

    return compare


def differences(expected: Any, found: Any, where: str = "$") -> list[str]:
    """Places where two JSON values differ, with both values; the order of the keys counts as well."""
    if isinstance(expected, dict) and isinstance(found, dict) and list(expected) == list(found):
        pairs = [(f"{where}.{key}", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(f"{where}[{at}]", *both) for at, both in enumerate(zip(expected, found, strict=True))]
    elif type(expected) is type(found) and expected == found:
        return []
    elif isinstance(expected, dict) and isinstance(found, dict) and expected.keys() != found.keys():
        missing = [key for key in expected if key not in found]
        new = [key for key in found if key not in expected]
        return [f"{where}: missing keys {missing}, unexpected keys {new}"]
    else:
        return [f"{where}: expected {_short(expected)}, got {_short(found)}"]
    return [line for place, one, other in pairs for line in differences(one, other, place)]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"


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
