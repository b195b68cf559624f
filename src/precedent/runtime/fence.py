"""One fence around everything that only makes answers faster: a fault there costs time, never an answer.

An *aid* is a part without which an engine gives the same answers, only later: a drafter, the planner, the cost curve,
recall's search, write-back, kept prefixes, metrics. After a fault (an exception, a number that is not finite, an answer
of the wrong size or type) its caller goes on without it. Three faults within a minute switch the aid off for the whole
engine, with one warning; after a pause it is tried again. Verification, sampling, grammars, the commit of tokens and
the checks of tenants are not aids: a fault there fails the request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

from precedent.runtime.plain_values import first_line

_log = logging.getLogger(__name__)

FAULTS, WITHIN = 3, 60.0
"""An aid is switched off after so many faults within so many seconds."""

FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Seconds until a switched-off aid is tried again; the pause doubles with each try that fails."""

DEADLINE = 30.0
"""Seconds that an aid's work may take on another thread."""

Result = TypeVar("Result")
Clock = Callable[[], float]


class Fault(Exception):
    """An aid gave an answer that cannot be used; `aid` names the aid that is to blame."""

    def __init__(self, aid: str, message: str) -> None:
        super().__init__(message)
        self.aid = aid


class Fence:
    """The fence around one aid of an engine. Any thread may use it.

    Only `Exception` is a fault: an interruption or the end of the interpreter passes through. Without `switch_off`
    faults are only counted, for an aid that is tried again soon enough by itself.
    """

    def __init__(
        self, name: str, clock: Clock = time.monotonic, deadline: float = DEADLINE, *, switch_off: bool = True
    ) -> None:
        self.name, self.deadline, self.num_faults, self._switch_off = name, deadline, 0, switch_off
        self._clock, self._lock = clock, threading.RLock()
        self._faults: deque[float] = deque(maxlen=FAULTS)
        self._off_until: float | None = None
        self._pause = FIRST_PAUSE
        self._pending: deque[tuple[float, Future[Any]]] = deque()
        self._hanging: Future[Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether to use the aid now: it is not switched off, or it is time to try it again."""
        if self._off_until is None and not self._pending:
            return self._hanging is None
        with self._lock:
            self._expire()
            self._recover()
            return self._hanging is None and (self._off_until is None or self._clock() >= self._off_until)

    @property
    def degraded(self) -> bool:
        """Whether the aid is switched off, or on trial after it was."""
        with self._lock:
            self._expire()
            self._recover()
            return self._off_until is not None or self._hanging is not None

    def fault(self, error: BaseException) -> None:
        """Count a fault, and switch the aid off if there were too many; keeps no reference to the error."""
        with self._lock:
            self._recover()
            now, self.num_faults = self._clock(), self.num_faults + 1
            if self._off_until is None:
                self._faults.append(now)
                if self._switch_off and len(self._faults) == FAULTS and now - self._faults[0] <= WITHIN:
                    self._off_until = now + self._pause
                    _log.warning(
                        "%s is switched off after %d faults within a minute and tried again in %.0f s; answers are the "
                        "same without it, only slower (%s)", self.name, FAULTS, self._pause, _told(error),
                    )  # fmt: skip
            elif now >= self._off_until:
                self._pause = min(2.0 * self._pause, LONGEST_PAUSE)
                self._off_until = now + self._pause
        _log.info("%s failed, one request goes on without it: %s", self.name, _told(error))
        _log.debug("the fault of %s", self.name, exc_info=error)

    def run(self, act: Callable[[], Result], otherwise: Result) -> Result:
        """What `act` returns; `otherwise` if it raises, or if the aid is switched off."""
        if not self.is_on:
            return otherwise
        try:
            return act()
        except Exception as error:
            self.fault(error)
            return otherwise

    def submit(self, executor: Executor, work: Callable[..., Result], /, *values: Any) -> Future[Result] | None:
        """Run work on another thread; None if the aid is switched off, or the executor takes no more work.

        It is a fault if the work raises, or is not done within the deadline.
        """
        if not self.is_on:
            return None
        try:
            future: Future[Result] = executor.submit(work, *values)
        except RuntimeError as error:  # shut down, because the engine is closing
            _log.debug("%s takes no more work: %s", self.name, error)
            return None
        with self._lock:
            self._pending.append((self._clock() + self.deadline, future))
        future.add_done_callback(self._ended)
        return future

    def hangs(self, work: Future[Any]) -> None:
        """Note a fault of work that nobody waits for any longer; the aid stays off until it has returned."""
        with self._lock:
            self._hanging = work
        self.fault(TimeoutError("its work on another thread does not end"))
        work.add_done_callback(self._returned)

    def settle(self) -> bool:
        """Wait for all submitted work, at most until its deadline; returns whether it has ended."""
        while True:
            with self._lock:
                self._expire()
                waited = self._pending[0] if self._pending else None
            if waited is None:
                return self._hanging is None
            done, _ = wait([waited[1]], timeout=max(0.0, min(waited[0] - self._clock(), self.deadline)))
            if done:
                self._ended(waited[1])
            else:
                self._overdue(waited)

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            expected = [each for each in self._pending if each[1] is future]
            for each in expected:
                self._pending.remove(each)
        if expected and not future.cancelled() and (error := future.exception()) is not None:
            self.fault(error)

    def _returned(self, work: Future[Any]) -> None:
        with self._lock:
            self._hanging = None if self._hanging is work else self._hanging

    def _expire(self) -> None:
        """Count work that is overdue."""
        while self._pending and self._clock() > self._pending[0][0]:
            self._overdue(self._pending[0])

    def _overdue(self, waited: tuple[float, Future[Any]]) -> None:
        with self._lock:
            if waited not in self._pending:
                return
            self._pending.remove(waited)
        waited[1].cancel()
        self.fault(TimeoutError(f"not done after {self.deadline:g} seconds"))

    def _recover(self) -> None:
        """Trust the aid again once it has worked for a minute after a pause."""
        if self._off_until is not None and self._clock() >= self._off_until + WITHIN:
            self._off_until, self._pause = None, FIRST_PAUSE
            self._faults.clear()
            _log.info("%s works again", self.name)


class Fences:
    """The fences of one engine, by the name of the aid; made on first use."""

    def __init__(self, clock: Clock = time.monotonic, deadline: float = DEADLINE, *, switch_off: bool = True) -> None:
        self.deadline, self.clock, self._switch_off = deadline, clock, switch_off
        self._lock = threading.Lock()
        self._fences: dict[str, Fence] = {}

    def of(self, name: str) -> Fence:
        """The fence around an aid."""
        with self._lock:
            if name not in self._fences:
                self._fences[name] = Fence(name, self.clock, self.deadline, switch_off=self._switch_off)
            return self._fences[name]

    def add(self, fence: Fence) -> None:
        """Take in a fence that several engines share."""
        with self._lock:
            self._fences[fence.name] = fence

    def degraded(self) -> tuple[str, ...]:
        """The aids that are switched off, or on trial after they were; sorted."""
        return tuple(sorted(fence.name for fence in self._all() if fence.degraded))

    def faults(self) -> dict[str, int]:
        """The number of faults of each aid that had any."""
        return {fence.name: fence.num_faults for fence in self._all() if fence.num_faults}

    def settle(self) -> bool:
        """Wait for all submitted work, at most until its deadline; returns whether it has ended."""
        settled = [fence.settle() for fence in self._all()]
        return all(settled)

    def _all(self) -> list[Fence]:
        with self._lock:
            return list(self._fences.values())


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
