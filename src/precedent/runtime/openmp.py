"""The OpenMP library that torch runs on, and its threads.

Every thread that computes gets workers of its own and keeps them. With more workers than processors, GNU's library
sleeps in the kernel at each wait, and a forward over few rows waits some hundred times. So a thread with nothing left
to compute releases its workers; getting new ones costs less than one such forward loses.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

_SOFT = 1
"""`omp_pause_soft`: ends the threads, keeps the settings."""


def release_workers() -> None:
    """Release the calling thread's workers, if it will not compute for a while; the next computation gets new ones.

    Does nothing unless torch runs on GNU's OpenMP.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@cache  # looking it up takes half a millisecond
def openmp_function(name: str) -> Any:
    """A function of the OpenMP library that torch runs on, or None if there is none.

    A second library would keep threads of its own, which spin while torch's threads need the cores.
    """
    path = _library()
    return getattr(ctypes.CDLL(path), name, None) if path else None


def _release_before_fork() -> None:
    """Release the forking thread's workers in every GNU library; the forked process would wait for them forever."""
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
    import torch  # here: a process that only stores vectors does not need it

    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    return next(iter(_loaded_libraries()), None)


def _loaded_libraries() -> list[str]:
    """Files of the OpenMP libraries in this process, those of torch first."""
    from threadpoolctl import threadpool_info  # here: a process that computes nothing does not need it

    files = {library["filepath"] for library in threadpool_info() if library["user_api"] == "openmp"}
    return sorted(files, key=lambda file: "torch" not in file)
