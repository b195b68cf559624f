"""Background work on daemon threads, which never keep a process alive.

At exit, a process finishes submitted work, except for long work: that is interrupted at its next line of Python, or not
started at all. Only threads of this module are ever interrupted.
"""

from __future__ import annotations

import atexit
import ctypes
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from precedent.runtime.process import OfOneProcess

Job = tuple[Future[Any], Callable[[], Any]]

_ENDING, _INTERRUPTING = threading.Event(), threading.Lock()
_LONG: set[int] = set()
"""Threads in a block of `long_work`."""


class Interrupted(SystemExit):
    """Raised inside long work to stop it, because the process is exiting."""


class _Thread(threading.Thread):
    """A thread of a `Background` and its queue of jobs; the job None ends it."""

    def __init__(self, name: str, jobs: queue.SimpleQueue[Job | None], begin: Callable[[], object] | None) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs, self._begin = jobs, begin

    def run(self) -> None:
        """Run jobs until one is None."""
        if self._begin is not None:
            self._begin()
        while (job := self.jobs.get()) is not None:
            _do(*job)
            del job  # do not keep the finished job alive while waiting for the next


class Background(Executor, OfOneProcess):
    """Runs work on at most `num_threads` threads, first come, first served; each thread calls `begin` first.

    The threads end with `shutdown`, when this object is garbage-collected, or at process exit.
    """

    instead = "make one in the process that uses it"

    def __init__(self, num_threads: int, name: str, begin: Callable[[], object] | None = None) -> None:
        self._num_threads, self._name, self._begin = num_threads, name, begin
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[_Thread] = []
        self._gate, self._closed = threading.Lock(), False
        weakref.finalize(self, _end, self._jobs, self._threads).atexit = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call; its future carries the result or exception. Raises RuntimeError after `shutdown`."""
        self.check_process()
        future: Future[Any] = Future()
        with self._gate:
            if self._closed:
                raise RuntimeError(f"{self._name} has been shut down and takes no more work")
            self._jobs.put((future, partial(fn, *args, **kwargs)))
            if len(self._threads) < self._num_threads:
                self._threads.append(_Thread(f"{self._name}_{len(self._threads)}", self._jobs, self._begin))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; end once submitted work is done, or with `cancel_futures` once started work is done."""
        if not self.is_here:
            return
        with self._gate:
            closed, self._closed = self._closed, True
        if cancel_futures:
            _cancel(self._jobs)
        if not closed or cancel_futures:
            _end(self._jobs, self._threads)
        if wait:
            for thread in self._threads:
                thread.join()


class AtOnce(Executor):
    """Runs work at once, on the submitting thread, where there is nothing to overlap."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call now; its future carries the result or exception."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def long_work() -> Iterator[None]:
    """A block that a `Background` thread leaves when the process exits; on other threads it has no effect."""
    if not isinstance(threading.current_thread(), _Thread):
        yield
        return
    if _ENDING.is_set():
        raise Interrupted
    thread = threading.get_ident()
    _LONG.add(thread)
    try:
        yield
    finally:
        with _INTERRUPTING:
            _LONG.discard(thread)
            # an interruption at the very end must not hit what follows; where there is none, clearing it slows the
            # interpreter down, and Python 3.11 hangs at it in a thread that a debugger or coverage traces
            if _ENDING.is_set():
                _raise_in(thread, None)


def interrupt_long_work() -> None:
    """Stop all long work, because the process is exiting."""
    _ENDING.set()
    with _INTERRUPTING:
        for thread in _LONG:
            _raise_in(thread, Interrupted)
    faiss = sys.modules.get("faiss")
    if _LONG and faiss is not None:
        faiss.TimeoutCallback.reset(1e-6)  # clustering takes seconds, but checks its timeout between blocks


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _do(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _cancel(jobs: queue.SimpleQueue[Job | None]) -> None:
    while not jobs.empty():
        job = jobs.get()
        if job is not None:
            job[0].cancel()


def _end(jobs: queue.SimpleQueue[Job | None], threads: list[_Thread]) -> None:
    for _ in threads:
        jobs.put(None)


def _finish() -> None:
    interrupt_long_work()
    ours = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    for thread in ours:
        thread.jobs.put(None)
    for thread in ours:
        thread.join()


atexit.register(_finish)
