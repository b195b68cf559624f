"""Calls of tools, and the one form in which two calls are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name and its arguments, as JSON values."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A call that may come next, with the probability that it does; `source` names the predictor."""

    call: Call
    probability: float
    source: str


def canonical(value: Any) -> str | None:
    """JSON with sorted keys: equal texts are equal values. None for what JSON cannot hold exactly, such as NaN.

    `1`, `1.0`, `true` and `"1"` differ.
    """
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False) if _plain(value) else None
    except (TypeError, ValueError, RecursionError):
        return None


def _plain(value: Any) -> bool:
    """Whether all keys are texts: JSON would write the key 1 as it writes the key "1"."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    return all(map(_plain, value)) if isinstance(value, list | tuple) else True


def leaves(value: Any) -> list[Any]:
    """All values inside lists and mappings, and the mappings' keys."""
    if isinstance(value, Mapping):
        return [leaf for key, inner in value.items() for leaf in (key, *leaves(inner))]
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value]
