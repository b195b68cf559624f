"""API keys in texts: how they begin, and how messages leave them out."""

from __future__ import annotations

import re

PREFIX = "pk-"
"""Begins every key, so that people and scanners of published code recognise one."""

_KEY = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{20,}")


def hide_keys(text: str) -> str:
    """A text without the keys in it, and without long pieces of keys."""
    return _KEY.sub(f"{PREFIX}…", text)
