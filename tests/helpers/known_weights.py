"""The two ways in which a mode verifies: row by row, and as on a GPU, where precedent-cuda is installed."""

from __future__ import annotations

from importlib.util import find_spec

from precedent.verify import LOSSLESS, Verifier

WAYS = ("row by row", "ahead") if find_spec("precedent_cuda") else ("row by row",)


def verifier_of(mode: str, way: str) -> Verifier:
    """How `mode` verifies: row by row, or with every weight computed before the walk."""
    if way == "row by row":
        return LOSSLESS[mode]
    from helpers.staged_weights import ahead

    return ahead(mode)
