"""Keys that tell whether two lists of settings name the same thing, so that it is loaded once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any


def key_of(value: Any) -> Hashable:
    """A key that is equal for equal names, paths and numbers, for mappings and lists of them, and for the same object.

    A key holds the objects in it: as long as it exists, no other object can be mistaken for one of them.
    """
    if isinstance(value, Path):
        return str(value.expanduser().resolve())
    if isinstance(value, Mapping):
        return frozenset((name, key_of(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(key_of(part) for part in value)
    if hasattr(value, "to_dict") and type(value).__hash__ is None:  # quantisation configs compare by their settings
        return type(value).__name__, key_of(value.to_dict())
    return value if isinstance(value, Hashable) else _ByIdentity(value)


class _ByIdentity:
    """Equal only to the key of the very same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
