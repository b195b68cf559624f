"""Checks of callers' values, and what messages show of values and errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from operator import index
from typing import Any

from precedent.errors import ConfigError, PrecedentError

MOST_DEEP = 100
"""Deepest accepted nesting of lists and dicts: code that walks a schema or an argument is recursive."""

MOST_SHOWN = 300
"""Most characters of a value that an error message shows."""


def is_whole(value: object) -> bool:
    """True for a Python or NumPy integer; booleans do not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for a finite real number of Python or NumPy; booleans do not count."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def checked_ids(
    name: str, ids: Any, expected: str, most: int | None = None, *, error: type[PrecedentError] = ConfigError
) -> tuple[int, ...]:
    """The first `most` token ids of a list, an array or a tensor. Raises `error`, which says what is `expected`."""
    try:
        if isinstance(ids, str | bytes | Mapping):
            raise TypeError
        return tuple(map(index, ids[:most]))
    except (TypeError, IndexError):
        raise error(f"{name}={shown(ids)} must be {expected}") from None


def check_plain(what: str, value: Any, error: type[PrecedentError] = ConfigError) -> None:
    """Raise `error` if a text in `value` holds a lone surrogate, or if its lists and dicts are nested too deeply.

    Walks keys and values of mappings and items of lists and tuples; anything else passes.
    """
    pending = [(value, 0)]
    while pending:
        found, depth = pending.pop()
        if isinstance(found, str):
            _check_text(what, found, error)
        elif isinstance(found, Mapping | list | tuple):
            if depth == MOST_DEEP:
                raise error(f"{what} is nested more than {MOST_DEEP} levels deep: make it flatter")
            parts = (*found.keys(), *found.values()) if isinstance(found, Mapping) else found
            pending.extend((part, depth + 1) for part in parts)


def _check_text(what: str, text: str, error: type[PrecedentError]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise error(
            f"{what} holds {text[problem.start]!r}, half of a surrogate pair, which is no character: "
            "decode the text with errors='replace'"
        ) from None


def shown(value: object) -> str:
    """A value's `repr` for an error message: one line, shortened if long."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


MOST_OF_AN_ERROR = 800
"""Most characters that a message of ours shows of another library's error."""


def in_one_line(error: BaseException) -> str:
    """An error's whole text in one line, without its final punctuation; its class's name if the text is empty.

    A very long text is cut where a sentence ends, or else a word.
    """
    text = " ".join(str(error).split())
    if len(text) > MOST_OF_AN_ERROR:
        head = text[:MOST_OF_AN_ERROR]
        sentence = head.rfind(". ")
        text = head[: sentence + 1] if sentence > MOST_OF_AN_ERROR // 4 else f"{head.rsplit(' ', 1)[0]} …"
    return text.rstrip(" .:") or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its final punctuation; its class's name if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__


KEY_PREFIX = "pk-"
"""Begins every API key, so that people and scanners of published code recognise one."""

_KEY = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{20,}")


def hide_keys(text: str) -> str:
    """A text without the keys in it, and without long pieces of keys."""
    return _KEY.sub(f"{KEY_PREFIX}…", text)
