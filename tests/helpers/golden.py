"""Golden files: results that must not change, recorded as JSON in `tests/golden`.

To change one on purpose, run its test with `--golden-write` and review the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden"
WRITE = "--golden-write"
WIDTH = 120

Golden = Callable[[str, Any], None]
"""The fixture `golden`: compares a value with the golden file of a name, or records it if asked to."""


def compare(name: str, value: Any, command: str) -> None:
    """Compare a value with the golden file of a name; `command` records it."""
    recorded, found = (FOLDER / f"{name}.json").read_text(encoding="utf-8"), _text(json.loads(json.dumps(value)))
    lines = (text.splitlines() for text in (recorded, found))
    differing = list(unified_diff(*lines, "recorded", "found", n=1, lineterm=""))
    told = f"{name} is not as recorded. If it should change, run this and review the difference: {command}"
    assert not differing, "\n".join([told, *differing[:60]])


def record(name: str, value: Any) -> None:
    """Write the golden file of a name."""
    (FOLDER / name).parent.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(_text(json.loads(json.dumps(value))) + "\n", encoding="utf-8")


ANYTHING = {"accepted_by_source", "drafted_by_source", "instructions", "others_cpu_share"}
"""Keys whose values have no shape: which drafters a step uses depends on measured times, the others on the machine."""


def shape(value: Any) -> Any:
    """Replace the values of a JSON document by their types; keep one element of each shape in a list."""
    if isinstance(value, dict):
        return {key: "anything" if key in ANYTHING else shape(one) for key, one in value.items()}
    if isinstance(value, list):
        shapes = [json.dumps(shape(one)) for one in value]
        return [json.loads(one) for one in dict.fromkeys(shapes)]
    return type(value).__name__


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
