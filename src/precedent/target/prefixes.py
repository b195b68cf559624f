"""How much two sequences of tokens have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int64]


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix, in tokens; compares growing pieces, so that long inputs run at C speed."""
    length, start, width = min(len(left), len(right)), 0, 64
    while start < length:
        stop = min(start + width, length)
        differing = _first_difference(left[start:stop], right[start:stop])
        if differing is not None:
            return start + differing
        start, width = stop, 8 * width
    return length


def _first_difference(left: Tokens, right: Tokens) -> int | None:
    """Index of the first token that differs between two pieces of equal length."""
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)) and list(left) == list(right):
        return None  # converting lists to arrays would take longer than comparing them
    differing = np.flatnonzero(np.asarray(left) != np.asarray(right))
    return int(differing[0]) if differing.size else None
