"""JSON as models write it: scanned by character, read and written in a form that others can represent.

A seal keeps invalid arguments invalid, because LangChain would repair truncated JSON by completing or cutting it: it
ends an open string and closes a bracket that was never opened.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

ARGUMENTS, WHOLE = "<invalid>", "<invalid call>"
_SEAL = re.compile(rf'(?:"| )[\]}}]({ARGUMENTS}|{WHOLE})\Z')


class JsonScanner:
    """Tracks nesting depth and whether the text ends within a string; never raises, whatever the text."""

    __slots__ = ("depth", "escaped", "in_string")

    def __init__(self) -> None:
        self.depth, self.in_string, self.escaped = 0, False, False

    def step(self, char: str) -> None:
        """Take the next character."""
        if self.in_string:
            self._step_in_string(char)
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1

    def _step_in_string(self, char: str) -> None:
        if self.escaped:
            self.escaped = False
        elif char == "\\":
            self.escaped = True
        elif char == '"':
            self.in_string = False


def load_json(text: str) -> Any:
    """Parse JSON, with line breaks allowed in strings. Raises ValueError for what JSON or UTF-8 cannot write back."""
    value = json.loads(text, strict=False, parse_constant=_refuse_constant)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def load_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    value = load_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"arguments must be an object, not {type(value).__name__}")
    return value


def dump_json(value: Any) -> str:
    """Write JSON as chat templates do. Raises ValueError for what JSON or UTF-8 cannot represent."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def escaped_in_string(char: str) -> str:
    """A character escaped for a JSON string; models write raw line breaks there."""
    return json.dumps(char)[1:-1] if char < " " else char


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_json(text: str) -> bool:
    """Whether a text is whole JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def seal_of(text: str, mark: str) -> str:
    """The seal to append to a broken call; `mark` is ARGUMENTS for the text after its name, WHOLE for all of it."""
    scanner, open_brackets = JsonScanner(), [""]
    for char in text:
        scanner.step(char)
        if scanner.in_string:
            continue
        if char in "{[":
            open_brackets.append(char)
        elif char in "}]" and len(open_brackets) > 1:
            open_brackets.pop()
    quote = ('\\"' if scanner.escaped else '"') if scanner.in_string else " "
    return f"{quote}{'}' if open_brackets[-1] == '[' else ']'}{mark}"


def unsealed(text: str) -> tuple[str, str | None]:
    """Return the text without its seal and the seal's mark, None if there is no seal."""
    seal = _SEAL.search(text)
    return (text, None) if seal is None else (text[: seal.start()], seal[1])
