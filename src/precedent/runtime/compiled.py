"""Compiles the inner loops of drafting: plain Python functions on numpy arrays, which numba translates when called.

The machine code is kept on disk beside the source (or in the user's cache folder), so only the first process waits a
few seconds. `NUMBA_BOUNDSCHECK=1` checks every index; the tests run so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code that runs without the interpreter's lock."""
    return cast(Function, njit(cache=True, nogil=True)(function))


@compiled
def contains(values: Int32s, value: int) -> bool:
    """Whether `value` is among a few `values`."""
    return bool((values == value).any())
