"""The OpenMP library that torch runs on, and its threads.

Every thread that computes gets workers of its own, which it keeps. GNU's library takes as many as there are processors
to be welcome: with more of them each wait becomes a sleep in the kernel, and a forward over few rows waits some hundred
times. So whoever has nothing left to compute lets its workers go; to get others takes less than one such forward loses.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_SOFT = 1
"""`omp_pause_soft`: the threads go, what they were told stays."""


def release_workers() -> None:
    """Let the calling thread's workers go; does nothing where torch runs on something else than GNU's OpenMP.

    For a thread that will not compute for a while. The next computation gets new ones.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


def openmp_function(name: str) -> Any:
    """A function of the OpenMP library that torch runs on; None where there is none.

    A second library would keep threads of its own, which spin while torch's want the cores.
    """
    path = _library()
    return getattr(ctypes.CDLL(path), name, None) if path else None


def _release_before_fork() -> None:
    """Let the forking thread's workers go, of every GNU library: the forked process would wait for them for ever."""
    if {"torch", "faiss"} & sys.modules.keys():
        for path in _loaded_libraries():
            if "gomp" in Path(path).name:
                ctypes.CDLL(path).omp_pause_resource_all(_SOFT)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_release_before_fork)


@cache
def _pause() -> Any:
    path = _library()
    return openmp_function("omp_pause_resource_all") if path and "gomp" in Path(path).name else None


@cache
def _library() -> str | None:
    import torch  # who only keeps vectors does not need it

    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    return next((path for path in _loaded_libraries() if "gomp" in path or "iomp" in path), None)


def _loaded_libraries() -> list[str]:
    """Files of the shared libraries in this process, torch's own first."""
    try:
        with Path("/proc/self/maps").open() as maps:
            files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(files, key=lambda file: "torch" not in file)
