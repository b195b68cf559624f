"""Compiles the inner loops of drafting: plain Python functions on numpy arrays, which numba compiles on first call.

The machine code is cached on disk beside the source (or in the user's cache folder), so only the first process waits a
few seconds. `NUMBA_BOUNDSCHECK=1` checks every index; the tests set it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from precedent.runtime.instructions import limit_compiler

limit_compiler()

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function to machine code that releases the GIL."""
    return cast(Function, njit(cache=True, nogil=True)(function))


@compiled
def contains(values: Int32s, value: int) -> bool:
    """Whether `value` is among `values`, by linear search."""
    return bool((values == value).any())
