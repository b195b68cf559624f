"""The ledger of calls that run ahead: what may start, what may be used, and what voids a result.

The rules, all under one lock:

- nothing starts while a change (a call that may alter the world) is in flight;
- a change voids every pending result when it begins and when it ends, whoever's they are;
- a result is used once, by the lane that started it, within its time to live;
- so many run at once, and so many in a lane's whole life.

A lane is one run of an agent in one invocation of its graph.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as TooLong
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from precedent.errors import ConfigError
from precedent.runtime.process import Lock


class Lane:
    """One run of an agent in one invocation; `over` says whether that invocation is over."""

    def __init__(self, over: Callable[[], bool] = lambda: False) -> None:
        self.over = over
        self.started = 0
        self.waiting: list[Pending] = []


@dataclass(eq=False, slots=True)
class Pending:
    """A call that was started ahead. `key` is its canonical arguments; `result` is set when the tool has answered.

    `seconds` is then what the tool took. `tool` and `key` may still change before that; `taken_for` holds those with
    which the call was taken. `holders` counts what keeps its place: the run ahead, and the tool while it runs.
    """

    id: str
    lane: Lane
    tool: object
    name: str
    key: str | None
    source: str
    epoch: int
    deadline: float
    result: Future[Any] = field(default_factory=Future)
    stop: Callable[[], None] = lambda: None
    dropped: str = ""
    seconds: float = 0.0
    taken_for: tuple[object, str | None] | None = None
    holders: int = 1


@dataclass(slots=True)
class Counts:
    """What became of the calls that ran ahead; `by_source` counts (started, used).

    `calls` counts the calls that the model made of tools on the list, `predicted` those of them that memory or the
    caller's predictor had named, started or not.
    """

    calls: int = 0
    predicted: int = 0
    started: int = 0
    used: int = 0
    seconds_saved: float = 0.0
    discarded: Counter[str] = field(default_factory=Counter)
    by_source: dict[str, list[int]] = field(default_factory=dict)


class Ledger:
    """Pending results of all lanes; any thread may call any method."""

    def __init__(
        self,
        *,
        at_once: int = 4,
        most_per_run: int = 100,
        time_to_live: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if at_once < 1 or most_per_run < 0 or not time_to_live > 0:
            raise ConfigError(
                f"at_once={at_once} must be at least 1, most_per_run={most_per_run} at least 0 and "
                f"time_to_live={time_to_live} seconds more than 0"
            )
        self._at_once, self._most, self._time_to_live, self._clock = at_once, most_per_run, time_to_live, clock
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._epoch = self._changes = self._running = 0
        self._waiting: set[Pending] = set()
        self.counts = Counts()

    def begin(self, lane: Lane, tool: object, name: str, key: str, source: str) -> Pending | None:
        """Register a call that is about to start ahead; None if it must not start. Call `ended` when it has ended."""
        with self._lock:
            self._expire()
            known = any(one.tool is tool and one.key == key for one in lane.waiting)
            if known or self._changes or self._running >= self._at_once or lane.started >= self._most:
                return None
            number, deadline = next(self._numbers), self._clock() + self._time_to_live
            pending = Pending(f"run-ahead-{number}", lane, tool, name, key, source, self._epoch, deadline)
            pending.result.set_running_or_notify_cancel()  # nobody can cancel the future itself
            self._running += 1
            lane.started += 1
            lane.waiting.append(pending)
            self._waiting.add(pending)
            self.counts.started += 1
            self.counts.by_source.setdefault(source, [0, 0])[0] += 1
            return pending

    def ended(self, pending: Pending) -> None:
        """A started call has ended, in whatever way: another may start in its place once its tool has ended too."""
        self.release(pending)
        if not pending.result.done():
            pending.result.set_exception(CancelledError())

    def hold(self, pending: Pending) -> bool:
        """Keep the call's place while its tool runs, until `release`; False if the tool must not start.

        It must not if it still runs from an earlier attempt, if the call has ended, or if it was thrown away.
        """
        with self._lock:
            if pending.holders != 1 or pending.dropped:
                return False
            pending.holders += 1
            return True

    def release(self, pending: Pending) -> None:
        """Give up one hold on the call's place."""
        with self._lock:
            pending.holders -= 1
            self._running -= pending.holders == 0

    def take(self, lane: Lane, tool: object, key: str | None) -> Pending | None:
        """Take the lane's pending result of an equal call out of the ledger; it may still be running.

        `wait` for it, or ask `result_of` once it is there, and say at the end whether it was `used` or `lost`.
        """
        with self._lock:
            self._expire()
            for pending in lane.waiting:
                if pending.tool is tool and key is not None and pending.key == key:
                    self._remove(pending)
                    pending.taken_for = tool, key
                    return pending
        return None

    def wait(self, pending: Pending) -> Any:
        """The result of a call that was taken, once it is there; None if it failed or must not be used."""
        try:
            pending.result.exception(self.seconds_left(pending))
        except TooLong:
            return None
        return self.result_of(pending)

    def result_of(self, pending: Pending) -> Any:
        """The result of a call that was taken, if it is there, no error and may be used now; else None."""
        if not pending.result.done() or pending.result.exception() is not None:
            return None
        return pending.result.result() if self._is_fresh(pending) else None

    def seconds_left(self, pending: Pending) -> float:
        """How long a result may still be waited for."""
        return max(0.0, pending.deadline - self._clock())

    def used(self, pending: Pending, seconds_saved: float) -> None:
        """Count a result that was handed over."""
        with self._lock:
            self.counts.used += 1
            self.counts.by_source[pending.source][1] += 1
            self.counts.seconds_saved += max(0.0, seconds_saved)

    def lost(self, pending: Pending, reason: str) -> None:
        """Count a result that was taken and could not be used, and stop its call."""
        with self._lock:
            self.counts.discarded[pending.dropped or reason] += 1
        pending.stop()

    def asked(self, calls: int, predicted: int) -> None:
        """Count the calls of listed tools that an answer makes, and how many of them were predicted."""
        with self._lock:
            self.counts.calls += calls
            self.counts.predicted += predicted

    @contextmanager
    def change(self) -> Iterator[None]:
        """A call that may alter the world is in flight: voids all results at its start and at its end."""
        self._void(+1)
        try:
            yield
        finally:
            self._void(-1)

    def void(self) -> None:
        """Void all pending results: something has changed outside the agent."""
        self._void(0)

    def _void(self, step: int) -> None:
        with self._lock:
            self._changes += step
            self._epoch += 1
            gone = self._discard(list(self._waiting), "changed")
        _stop(gone)

    def discard(self, lane: Lane, reason: str) -> None:
        """Throw away all pending results of a lane, and stop their calls."""
        with self._lock:
            gone = self._discard(list(lane.waiting), reason)
        _stop(gone)

    def drop(self, pending: Pending, reason: str) -> None:
        """Throw away one pending result, if it still waits."""
        with self._lock:
            gone = self._discard([pending] if pending in self._waiting else [], reason)
        _stop(gone)

    def _is_fresh(self, pending: Pending) -> bool:
        """Whether nothing has changed since the call began, it is not too old, and it is the call that was taken."""
        with self._lock:
            tool, key = pending.taken_for or (pending.tool, pending.key)
            same = pending.tool is tool and pending.key == key
            return same and pending.epoch == self._epoch and self._clock() <= pending.deadline and not pending.dropped

    def _expire(self) -> None:
        """Throw away what is too old and what nobody can ask for any more; its calls are told to stop."""
        now = self._clock()
        _stop(self._discard([one for one in self._waiting if now > one.deadline], "expired"))
        _stop(self._discard([one for one in self._waiting if one.lane.over()], "abandoned"))

    def _discard(self, pendings: list[Pending], reason: str) -> list[Pending]:
        for pending in pendings:
            self._remove(pending)
            pending.dropped = reason
            self.counts.discarded[reason] += 1
        return pendings

    def _remove(self, pending: Pending) -> None:
        pending.lane.waiting.remove(pending)
        self._waiting.discard(pending)


def _stop(pendings: list[Pending]) -> None:
    for pending in pendings:
        pending.stop()
