"""Values from the prompt for the holes of templates: an id the user named, an address in a tool's result.

They are recognised by their JSON key or by their form; the latest come first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from precedent.text.templates import Hole

_PAIR = re.compile(r'"([\w-]+)"\s*:\s*("(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?)')
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IDENTIFIER = re.compile(r"(?<![\w@.-])#?([A-Za-z]*[-_]?\d[\w-]*)")
_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w-])")
_QUOTED = re.compile(r"['\u2018\u201c]([^'\"\u2018-\u201d\n]{2,80})['\u2019\u201d]")

MAX_CHARACTERS = 500
"""Longer values are not proposed."""

_ABOUT_IDENTIFIERS = re.compile(r"(^|_)(id|number|no|code|key|ref|reference|order|zip)s?$", re.IGNORECASE)
_ABOUT_EMAILS = re.compile(r"mail", re.IGNORECASE)


class _Found(NamedTuple):
    position: int
    value: str


class PromptValues:
    """The values in a text, searched on demand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pairs: list[tuple[str, _Found]] | None = None
        self._by_pattern: dict[re.Pattern[str], list[_Found]] = {}

    def of(self, hole: Hole, most: int) -> list[str]:
        """At most `most` values that fit a hole, the latest first, each as written there."""
        found = sorted((*self._by_key(hole), *self._by_looks(hole)), reverse=True)
        fitting = (hole_text(hole, one.value) for one in found)
        return list(dict.fromkeys(value for value in fitting if 0 < len(value) <= MAX_CHARACTERS))[:most]

    def _by_key(self, hole: Hole) -> Iterator[_Found]:
        """JSON values under the hole's name, or under a key that is a suffix of it or ends in it."""
        if self._pairs is None:
            matches = _PAIR.finditer(self._text)
            self._pairs = [(match[1].lower(), _Found(match.end(), _read(match[2]))) for match in matches]
        return (found for key, found in self._pairs if _alike(key, hole.name.lower()))

    def _by_looks(self, hole: Hole) -> list[_Found]:
        """Values in the form that the hole's kind and name suggest: a number, an email address, an identifier."""
        if hole.kind == "number":
            pattern = _NUMBER
        elif _ABOUT_EMAILS.search(hole.name):
            pattern = _EMAIL
        else:
            pattern = _IDENTIFIER if _ABOUT_IDENTIFIERS.search(hole.name) else _QUOTED
        if pattern not in self._by_pattern:  # searched once, however many holes there are
            found = pattern.finditer(self._text)
            self._by_pattern[pattern] = [_Found(match.end(), match[pattern.groups]) for match in found]
        return self._by_pattern[pattern]


def hole_text(hole: Hole, value: str) -> str:
    """A value as written in a hole, "" if it does not fit."""
    write: Callable[[str], str] = _WRITTEN[hole.kind]
    return write(value)


def _alike(key: str, name: str) -> bool:
    return key == name or name.endswith(f"_{key}") or key.endswith(f"_{name}")


def _read(literal: str) -> str:
    """The text of a JSON string or number; a broken string without its quotes."""
    try:
        return str(json.loads(literal)) if literal.startswith('"') else literal
    except ValueError:
        return literal.strip('"')


def _number(value: str) -> str:
    return value if _NUMBER.fullmatch(value) else ""


def _string_body(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


_WRITTEN: dict[str, Callable[[str], str]] = {
    "text": str.strip,
    "string": _string_body,
    "number": _number,
    "json": lambda value: _number(value) or f'"{_string_body(value)}"',
}
