"""The fence around running ahead: a fault of it costs an agent nothing but the time that it would have saved."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from contextvars import copy_context

from precedent.runtime.background import Background
from precedent.runtime.fence import Fences, Result

RUN_AHEAD, MEMORY, PREDICT = "running ahead", "the memory of earlier runs", "predict="
"""The aids of an agent, as `RunAheadMiddleware.degraded` names them."""

PATIENCE = 2.0
"""Seconds that an agent waits for predictions, and for its actions to be stored."""


class Aids:
    """Does what only makes an agent faster. After a fault, its caller goes on without it."""

    def __init__(self, fences: Fences | None = None) -> None:
        self.fences = fences or Fences()
        self._threads = Background(2, "precedent-run-ahead")

    def run(self, act: Callable[[], Result], otherwise: Result) -> Result:
        """Do a part of running ahead that takes no time."""
        return self.fences.of(RUN_AHEAD).run(act, otherwise)

    def waited(self, name: str, work: Callable[[], Result], otherwise: Result) -> Result:
        """Do work that may take long on another thread; `otherwise` if it does."""
        fence = self.fences.of(name)

        def act() -> Result:
            job = fence.submit(self._threads, copy_context().run, work)
            if job is None:
                return otherwise
            if not wait([job], timeout=PATIENCE).done:
                fence.hangs(job)
                return otherwise
            return otherwise if job.exception() is not None else job.result()

        return fence.run(act, otherwise)
