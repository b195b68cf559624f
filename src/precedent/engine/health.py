"""Whether an engine serves requests: how they ended in the last minute, and whether its thread gets on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from precedent.errors import GenerationError, GrammarError, PrecedentError

WITHIN = 60.0
"""Seconds for which an outcome counts."""

FEWEST_ERRORS, SHARE = 3, 0.2
"""An engine fails if so many requests of the last minute, and such a share of them, ended in internal errors."""

STALLED_SECONDS = 120.0
"""Seconds after which a round that does not end counts as stalled, unless another limit is given."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether an engine serves requests: `failing` says why not, and is empty if it does.

    `degraded` names what is switched off because it failed; answers are the same without it, only slower.
    """

    failing: str = ""
    degraded: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """`ok`, `degraded` or `failing`."""
        return "failing" if self.failing else "degraded" if self.degraded else "ok"


class Outcomes:
    """How the requests of the last minute ended. Written by the worker's thread, read on any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._ended: deque[tuple[float, bool]] = deque(maxlen=10_000)

    def note(self, error: PrecedentError | None) -> None:
        """A request has ended, normally or with an error; only what the request did not ask for counts against us."""
        internal = isinstance(error, GenerationError) and not isinstance(error, GrammarError)
        with self._lock:
            self._ended.append((self._clock(), internal))

    def failing(self) -> str:
        """Why requests fail; empty if they do not."""
        with self._lock:
            since = self._clock() - WITHIN
            while self._ended and self._ended[0][0] < since:
                self._ended.popleft()
            ended, errors = len(self._ended), sum(internal for _, internal in self._ended)
        if errors < FEWEST_ERRORS or errors < SHARE * ended:
            return ""
        return f"{errors} of the {ended} requests of the last minute ended in internal errors"
