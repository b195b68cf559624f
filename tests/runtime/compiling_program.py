"""Calls compiled code in a child process for each name on standard input, and prints its answer, or how the child died.

python tests/runtime/compiling_program.py
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from typing import Any

import numpy as np
from numba import carray, njit, types

from precedent.runtime.compiled import compiled, compiled_callback


def total(values: Any) -> float:
    found = 0.0
    for index in range(len(values)):
        found += values[index] * (index + 1)
    return found


def double(address: Any) -> None:
    carray(address, 1)[0] *= 2


def answers() -> None:
    number = ctypes.c_int64(21)
    values = np.arange(6, dtype=np.float64), np.arange(6, dtype=np.int32)
    function = compiled(total)
    found = [function(each) for each in values]
    compiled_callback(double, types.void(types.CPointer(types.int64))).ctypes(ctypes.pointer(number))
    print([*found, number.value], flush=True)


njit(total)(np.zeros(1))  # loads what every child needs
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
logging.getLogger("numba").setLevel(logging.WARNING)
for _ in sys.stdin:
    if (child := os.fork()) == 0:
        answers()
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
