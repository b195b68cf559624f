"""Compiles the inner loops of drafting: plain Python functions on numpy arrays, which numba compiles on first call.

The machine code is kept on disk beside the source (or in the user's cache folder), so only the first process waits, and
says so. Each file carries a checksum, because damaged machine code would crash the process: whatever is wrong with a
file, the function is compiled again. `NUMBA_BOUNDSCHECK=1` checks every index; the tests set it.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numpy.typing import NDArray

from precedent.runtime.instructions import limit_compiler
from precedent.runtime.recomputable import sealed, unsealed

limit_compiler()

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

KERNELS = re.compile(rb"import .*\bcompiled|^(from|import) (numba|llvmlite)", re.MULTILINE)
"""An import that only files with compiled functions have."""

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function to machine code that releases the GIL."""
    dispatcher: Any = njit(nogil=True)(function)
    dispatcher._cache = _cache_of(function, dispatcher._cache)
    return cast(Function, dispatcher)


def compiled_callback(function: Callable[..., Any], signature: Any) -> Any:
    """A function as machine code that C can call; compiled now, unless it is kept on disk."""
    callback: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options={})
    callback._cache = _cache_of(function, callback._cache)
    callback.compile()
    return callback


@cache
def _version(package: str) -> str:
    """The version of numba, and a hash of all files with compiled functions in a package and in ours.

    For numba itself notices a change only in a function's own file, and not in those of the functions that it calls.
    """
    roots = sorted({Path(__file__).parents[1], *map(Path, getattr(sys.modules[package], "__path__", ()))})
    texts = [text for root in roots for file in sorted(root.rglob("*.py")) if KERNELS.search(text := file.read_bytes())]
    return f"{numba.__version__} {hashlib.blake2b(b''.join(texts), digest_size=8).hexdigest()}"


@cache
def _say_that_it_takes_long() -> None:
    log.warning("compiling kernels for this processor: once, up to three minutes")


def _cache_of(function: Callable[..., Any], otherwise: Any) -> Any:
    try:
        return _Kept(function)
    except Exception as problem:  # no folder can be written
        log.info("the machine code of %s is not kept: %s", function.__qualname__, problem)
        return otherwise


class _Kept(FunctionCache):
    """Machine code of one function on disk, for each signature and processor. Reading and writing never raise."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        locator = self._impl.locator
        stamp = f"{_version(function.__module__.partition('.')[0])} {locator.get_source_stamp()}"
        self._cache_file = _Sealed(locator.get_cache_path(), self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code; None if it is not there, or the files are not sound."""
        code = None
        try:
            code = super().load_overload(sig, target_context)
        except Exception as problem:
            log.info("compiling %s again: its files in %s cannot be used: %s", self._name, self.cache_path, problem)
            with suppress(OSError):
                self.flush()
        if code is None:
            _say_that_it_takes_long()
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep machine code, if the folder can be written."""
        try:
            super().save_overload(sig, data)
        except Exception as problem:
            log.info("the machine code of %s is not kept: %s", self._name, problem)


class _Sealed(IndexDataCacheFile):
    """numba's files, with checksums. Machine code that belongs to another key of the index is refused."""

    def load(self, key: Any) -> Any:
        """Raise if the files are damaged."""
        content = super().load(key)
        return None if content is None else pickle.loads(unsealed(content, f"{self._source_stamp} {key}"))

    def save(self, key: Any, data: Any) -> None:
        """Write machine code and index."""
        super().save(key, sealed(dumps(data), f"{self._source_stamp} {key}"))

    def _load_index(self) -> Any:
        try:
            content = Path(self._index_path).read_bytes()
        except FileNotFoundError:
            return {}
        return pickle.loads(unsealed(content, self._source_stamp))

    def _save_index(self, data_names: Any) -> None:
        with self._open_for_write(self._index_path) as file:
            file.write(sealed(dumps(data_names), self._source_stamp))


@compiled
def contains(values: Int32s, value: int) -> bool:
    """Whether `value` is among `values`, by linear search."""
    return bool((values == value).any())
