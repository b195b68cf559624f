"""Long lists of cases, of which a few are tried each time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], step: int) -> list[Any]:
    """Every case; one in `step` is tried each time, the others in `make test-exhaustive`."""
    lists = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.exhaustive] if at % step else []) for at, case in enumerate(lists)]
