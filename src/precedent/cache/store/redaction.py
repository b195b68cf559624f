"""What is taken out of a completion before it is stored, or kept from being stored at all."""

from __future__ import annotations

import re
from collections.abc import Callable

from precedent.cache.store.records import NewCompletion
from precedent.errors import CacheError

Redact = Callable[[NewCompletion], NewCompletion | None]
"""Gives what is stored in the place of a completion, None to store nothing.

Token ids hold the answer as well as `text` does: to take something out of `text` alone leaves it in `token_ids`.
"""


def never_store(*patterns: str) -> Redact:
    """A `Redact` that stores nothing whose query or text matches one of these regular expressions.

    Raises CacheError for a pattern that is none.
    """
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise CacheError(f"{error.pattern!r} is no regular expression: {error}") from error

    def redact(completion: NewCompletion) -> NewCompletion | None:
        texts = (completion.query, completion.text)
        return None if any(one.search(text) for one in compiled for text in texts) else completion

    return redact


def in_turn(*steps: Redact) -> Redact:
    """Each step sees what the one before has left."""

    def redact(completion: NewCompletion) -> NewCompletion | None:
        left: NewCompletion | None = completion
        for step in steps:
            left = None if left is None else step(left)
        return left

    return redact


def apply(redact: Redact, completion: NewCompletion) -> NewCompletion | None:
    """What `redact` leaves. Raises CacheError when it fails or changes whose completion it is."""
    try:
        redacted = redact(completion)
    except Exception as error:
        raise CacheError(f"redaction failed, so nothing was stored: {type(error).__name__}: {error}") from error
    if redacted is None:
        return None
    if (redacted.tenant, redacted.tokenizer) != (completion.tenant, completion.tokenizer):
        raise CacheError("redaction may not change tenant or tokenizer; nothing was stored")
    return redacted
