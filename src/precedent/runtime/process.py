"""Fork safety: objects that belong to one process, and locks that survive a fork.

A forked process copies its parent's memory, but only the thread that forked: waiting for another thread would hang, and
a lock that another thread held stays locked. Objects that cannot survive a fork refuse use in the new process; the
others start afresh. Locks inside native libraries (such as Intel MKL's memory lock) cannot be reset. So a fork waits a
while until none of our threads computes; if one still does, the new process refuses to compute.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, ClassVar, NoReturn, Self

from precedent.errors import PrecedentError, UnsupportedError

PATIENCE = 3.0
"""Seconds that a fork waits for computing threads: enough for an engine's step, not for loading a model."""


class _Forks:
    """How many forks lie between the import of this package and this process, and whether one interrupted computing."""

    number = 0
    amid_computing = False
    one_at_a_time = threading.Lock()
    over = threading.Event()
    """Cleared while a thread forks; no other thread starts computing meanwhile."""

    over.set()


_COMPUTING: dict[int, int] = {}
"""How many nested `computing` blocks each thread is in."""

_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def this_process() -> int:
    """A number that changes with every fork; unlike process ids, it is not reused."""
    return _Forks.number


@contextmanager
def computing() -> Iterator[None]:
    """A block in which this thread may hold locks of native libraries; it does not start while another thread forks."""
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
    """Raise UnsupportedError if this process was forked while another thread was computing: it could hang."""
    if _Forks.amid_computing:
        raise UnsupportedError(
            "this process was forked while another thread was loading or running a model, so locks of native libraries "
            "may still be held: fork before, or while no model runs, or start processes with spawn"
        )


def in_forked_processes(begin: Callable[[], None]) -> None:
    """Call `begin` in every process forked from this one, before anything else runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=begin)


class Lock:
    """A lock for `with` that is free in a forked process, even if a thread held it in the parent."""

    def __init__(self) -> None:
        self._lock = self._held = threading.Lock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held = lock  # the one to release: a fork within the block replaces `_lock` in the new process

    def __exit__(self, *error: object) -> None:
        self._held.release()

    def renew(self) -> None:
        """Replace the lock with a free one."""
        self._lock = threading.Lock()


class OfOneProcess:
    """An object that works only in the process that made it; it cannot be pickled, and copying returns itself."""

    instead: ClassVar[str]
    """What to do instead, for error messages."""

    refused_as: ClassVar[type[PrecedentError]] = UnsupportedError
    _made_in: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Record the current process, so that subclasses need not call `super().__init__`."""
        made = super().__new__(cls)
        made._made_in = _Forks.number
        return made

    @property
    def is_here(self) -> bool:
        """True unless this process was forked after the object was made."""
        return self._made_in == _Forks.number

    def check_process(self) -> None:
        """Raise `refused_as` if this process was forked after the object was made."""
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
