"""Messages without the random ids of their calls, for comparison."""

from __future__ import annotations

import re
from typing import Any

_MADE = re.compile(r"call_[0-9a-f]{24}")


def numbered(value: Any) -> Any:
    """Replace each id that an answer's call got by its number in order of appearance, at any depth."""
    seen: dict[str, str] = {}

    def replaced(part: Any) -> Any:
        if isinstance(part, str):
            return seen.setdefault(part, f"call number {len(seen)}") if _MADE.fullmatch(part) else part
        if isinstance(part, dict):
            return {key: replaced(value) for key, value in part.items()}
        return [replaced(each) for each in part] if isinstance(part, list | tuple) else part

    return replaced(value)
