"""The thread that owns the target model and runs the scheduler, round after round, until the engine is closed."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from time import perf_counter

import torch

from precedent.engine.health import EngineHealth
from precedent.engine.metrics import EngineMetrics
from precedent.engine.queued_sequence import QueuedSequence
from precedent.engine.scheduler import Scheduler
from precedent.errors import EngineClosedError, PrecedentError, RequestCancelled
from precedent.runtime.background import interrupt_long_work
from precedent.runtime.failures import as_ours
from precedent.runtime.openmp import release_workers
from precedent.runtime.process import OfOneProcess, computing

log = logging.getLogger(__name__)


class Worker(OfOneProcess):
    """Runs a scheduler on its own thread. It holds no reference to the engine, so dropping the engine stops it.

    Once every request has ended, that thread calls `ended`, which releases what the requests shared. In a forked
    process, which lacks the thread, `stop` and `close` do nothing.
    """

    instead = "load the model there"

    def __init__(self, scheduler: Scheduler, ended: Callable[[], None]) -> None:
        self.scheduler, self._ended, self.closed = scheduler, ended, False
        self._inbox: queue.SimpleQueue[QueuedSequence | Callable[[], None] | None] = queue.SimpleQueue()
        self._round_began: float | None = None
        self._received = perf_counter()
        self._gate = threading.RLock()  # re-entrant: the garbage collector may stop the worker on any thread
        self._thread = threading.Thread(target=self._run, name="precedent-worker", daemon=True)
        atexit.register(self._leave)  # the thread must not be inside torch when the interpreter exits
        self._thread.start()

    def submit(self, sequence: QueuedSequence) -> None:
        """Queue a request; it joins before the next step if it fits. Raises EngineClosedError."""
        release_workers()  # the calling thread waits for the answer now; earlier computation may have left it workers
        with self._gate:
            if self.closed:
                raise EngineClosedError("the engine is closed and takes no more requests: load a new one")
            self._inbox.put(sequence)

    def drop_idle(self) -> None:
        """Evict all idle conversations before the next round, without waiting; does nothing once it is closed."""
        with self._gate:
            if self.is_here and not self.closed:
                self._inbox.put(self.scheduler.admission.drop_idle)

    def stop(self) -> None:
        """Ask the thread to end after the current round, without waiting; safe on any thread, any number of times."""
        if self.is_here:
            with self._gate:
                self.closed = True
                self._inbox.put(None)

    def close(self) -> None:
        """Stop, and wait until every request has ended; on the worker's own thread, do not wait."""
        self.stop()
        if self.is_here and threading.current_thread() is not self._thread:
            self._thread.join()

    def _leave(self) -> None:
        interrupt_long_work()  # `close` may wait for background work
        self.close()

    def metrics(self) -> EngineMetrics:
        """A snapshot of the scheduler's metrics; requests that it has not received yet count as waiting."""
        return self.scheduler.metrics(0 if self.closed else self._inbox.qsize())

    def health(self, stalled_seconds: float) -> EngineHealth:
        """Whether requests are served. A thread is stalled if it works on one thing for so long."""
        scheduler, began, now = self.scheduler, self._round_began, perf_counter()
        failing = scheduler.outcomes.failing()
        seconds = now - began if began is not None else 0.0 if self._inbox.empty() else now - self._received
        if self.closed:
            failing = "the engine is closed"
        elif seconds > stalled_seconds:
            failing = f"the engine's thread has not advanced for {seconds:.0f} s while requests wait"
        return EngineHealth(failing, scheduler.fences.degraded())

    @torch.inference_mode()
    def _run(self) -> None:
        failure: PrecedentError = RequestCancelled("the engine was closed before the request was finished")
        try:
            while self._receive():
                with computing():
                    self._round_began = perf_counter()
                    self.scheduler.round()
                    self._round_began = None
        except BaseException as error:  # whatever it is, no caller may be left waiting
            log.exception("the worker of an engine failed; the engine is closed")
            cause = error if isinstance(error, Exception) else RuntimeError(repr(error))
            failure = as_ours(cause, "running the engine, which is closed now")
        finally:
            self.stop()
            self._fail_all(failure)
            atexit.register(self._thread.join)  # the thread still has a model to free, but needs the worker no longer
            atexit.unregister(self._leave)

    def _receive(self) -> bool:
        """Receive new requests, waiting while there is nothing to do; False if the thread should end."""
        while self.scheduler.idle or not self._inbox.empty():
            if self._inbox.empty():
                with computing():
                    release_workers()
            try:
                received = self._inbox.get(timeout=self.scheduler.finish.seconds_left())
            except queue.Empty:  # time to report a completion that takes too long to store
                continue
            finally:
                self._received = perf_counter()
            if received is None:
                return False
            self._take(received)
        return True

    def _take(self, received: QueuedSequence | Callable[[], None]) -> None:
        if isinstance(received, QueuedSequence):
            self.scheduler.waiting.append(received)
        else:
            received()

    def _fail_all(self, failure: PrecedentError) -> None:
        """Fail every request that is running, waiting or still in the inbox; then release what they shared."""
        while not self._inbox.empty():
            received = self._inbox.get()
            if received is not None:
                self._take(received)
        try:
            self.scheduler.fail_all(failure)
        finally:
            self.scheduler.finish.close()
            self._ended()
