"""Redaction: takes something out of a completion before it is stored, or keeps it from being stored."""

from __future__ import annotations

import re
from collections.abc import Callable

from precedent.cache.records import Completion
from precedent.errors import CacheError

Redact = Callable[[Completion], Completion | None]
"""Returns what to store instead of a completion, or None to store nothing.

Token ids contain the answer just as `text` does: what is removed from `text` alone remains in `token_ids`.
"""


def never_store(*patterns: str) -> Redact:
    """A `Redact` that stores nothing whose query or text matches one of these regular expressions.

    Raises CacheError for an invalid pattern.

    >>> never_store("(")
    Traceback (most recent call last):
    precedent.errors.CacheError: '(' is not a regular expression: missing ), unterminated subpattern at position 0
    """
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise CacheError(f"{error.pattern!r} is not a regular expression: {error}") from error

    def redact(completion: Completion) -> Completion | None:
        texts = (completion.query, completion.text)
        return None if any(one.search(text) for one in compiled for text in texts) else completion

    return redact


def in_turn(*steps: Redact) -> Redact:
    """Chain redactions: each step gets the result of the one before."""

    def redact(completion: Completion) -> Completion | None:
        left: Completion | None = completion
        for step in steps:
            left = None if left is None else step(left)
        return left

    return redact


def apply(redact: Redact, completion: Completion) -> Completion | None:
    """The result of `redact`. Raises CacheError if it fails, or changes tenant or tokenizer."""
    try:
        redacted = redact(completion)
    except Exception as error:
        raise CacheError(f"redaction failed, so nothing was stored: {type(error).__name__}: {error}") from error
    if redacted is None:
        return None
    if (redacted.tenant, redacted.tokenizer) != (completion.tenant, completion.tokenizer):
        raise CacheError("redaction may not change tenant or tokenizer; nothing was stored")
    return redacted
