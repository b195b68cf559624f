"""What belongs to one process.

A forked process has its parent's memory, but of its threads only the one that forked: whoever waits for another waits
for ever, and a lock that another one held stays held. What cannot go along says so at once; the rest begins anew. Locks
inside of native libraries (such as that of Intel MKL's memory) cannot begin anew: a fork waits a while until no thread
of ours computes, and where one still does, nothing is computed in the new process.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

from precedent.errors import PrecedentError, UnsupportedError

PATIENCE = 3.0
"""Seconds that a fork waits for threads that compute: an engine's step is over by then, the loading of a model not."""


class _Forks:
    """How often this process was forked from another since the package was imported, and whether amid computing."""

    number = 0
    amid_computing = False
    one_at_a_time = threading.Lock()
    over = threading.Event()
    """Not set while a thread forks: nobody begins to compute meanwhile."""

    over.set()


_COMPUTING: dict[int, int] = {}
"""How many blocks of `computing` each thread is in."""

_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def this_process() -> int:
    """Which process this is: another number in each that is forked from it. The system's numbers come again."""
    return _Forks.number


@contextmanager
def computing() -> Iterator[None]:
    """A block in which this thread may hold locks of native libraries; it is not begun while another thread forks."""
    thread = threading.get_ident()
    if thread not in _COMPUTING:
        _Forks.over.wait()
    _COMPUTING[thread] = _COMPUTING.get(thread, 0) + 1
    try:
        yield
    finally:
        _COMPUTING[thread] -= 1
        if not _COMPUTING[thread]:
            del _COMPUTING[thread]


def check_fork() -> None:
    """Raise UnsupportedError where this process was forked while another thread was computing: it could hang."""
    if _Forks.amid_computing:
        raise UnsupportedError(
            "this process was forked while another thread was loading or running a model, which may have left locks of "
            "native libraries behind: fork before, or while models rest, or start processes by spawn"
        )


def in_forked_processes(begin: Callable[[], None]) -> None:
    """Call a function in every process that is forked from this one, before anything else runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=begin)


class Lock:
    """A lock for `with` that is free in a forked process, whoever held it in the parent."""

    def __init__(self) -> None:
        self._lock = self._held = threading.Lock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held = lock  # the one to release: a fork within the block gives the other process a new one

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.release()

    def renew(self) -> None:
        """Begin with a lock that nobody holds."""
        self._lock = threading.Lock()


class OfOneProcess:
    """Stays in the process that made it: refused in a forked one, not pickled; its copies are itself."""

    instead: ClassVar[str]
    """What to do instead of taking it along, for errors."""

    refused_as: ClassVar[type[PrecedentError]] = UnsupportedError
    _made_in: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Note the process; `__init__` is the subclass's own."""
        made = super().__new__(cls)
        made._made_in = _Forks.number
        return made

    @property
    def is_here(self) -> bool:
        """True unless this process was forked since."""
        return self._made_in == _Forks.number

    def check_process(self) -> None:
        """Raise an error where this process was forked after it was made."""
        if not self.is_here:
            raise self.refused_as(f"this {type(self).__name__} was made before the process was forked: {self.instead}")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise UnsupportedError(f"this {name} belongs to its process and cannot be pickled: {self.instead}")


def _others() -> set[int]:
    return _COMPUTING.keys() - {threading.get_ident()}


def _before_fork() -> None:
    _Forks.one_at_a_time.acquire()
    _Forks.over.clear()
    deadline = monotonic() + PATIENCE
    while _others() and monotonic() < deadline:
        sleep(0.001)


def _after_fork_in_parent() -> None:
    _Forks.over.set()
    _Forks.one_at_a_time.release()


def _after_fork_in_child() -> None:
    _Forks.number += 1
    _Forks.one_at_a_time, _Forks.over = threading.Lock(), threading.Event()
    _Forks.over.set()
    for thread in _others():
        _Forks.amid_computing = True
        del _COMPUTING[thread]
    for lock in list(_LOCKS):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
