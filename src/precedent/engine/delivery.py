"""The normal end of a request: call the observer, store the completion, then report the result to its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from precedent.cache import Completion
from precedent.engine.generation import GenerationResult
from precedent.engine.sequence import QueuedSequence
from precedent.runtime.fence import Fences

WRITE_BACK, OBSERVER = "write-back", "the observer of results"
"""The names of both among the aids of an engine."""

ResultObserver = Callable[[tuple[int, ...], GenerationResult], None]
"""Called with a finished request's prompt ids and its result, on one of the engine's threads."""

CompletionKeeper = Callable[[Completion], object]
"""Takes a finished completion, on one of the engine's threads: `SpeculationCache.insert`, or a buffer for it."""


def write_back_to(store: CompletionKeeper, asked: Completion, result: GenerationResult) -> None:
    """Store an answer with what was asked."""
    store(replace(asked, token_ids=result.token_ids, text=result.text))


class _Report(NamedTuple):
    """A result that is reported when its `job` is done, at the latest at `until`, by the fences' clock."""

    until: float
    sequence: QueuedSequence
    result: GenerationResult
    job: Future[None]


class Finisher:
    """Stores completions on another thread and reports them, at the latest after a deadline.

    So a reported completion is a stored one, unless storing fails, is switched off or takes too long: none of these
    fails or delays an answer further. All methods belong to the worker's thread.
    """

    def __init__(self, executor: Executor, fences: Fences) -> None:
        self._executor, self._fences = executor, fences
        self._reporting: deque[_Report] = deque()

    def __call__(self, sequence: QueuedSequence, result: GenerationResult) -> None:
        """Store and report the result of a sequence."""
        if not any(self._fences.of(name).is_on for name in sequence.actions):
            sequence.generation.finish(result)
            return
        try:
            job = self._executor.submit(self._store_and_report, sequence, result)
        except RuntimeError:  # the interpreter is exiting
            self._store_and_report(sequence, result)
            return
        self._reporting.append(_Report(self._fences.clock() + self._fences.deadline, sequence, result, job))

    def seconds_left(self) -> float | None:
        """Report what takes too long to store; returns the seconds until the next deadline, None without one."""
        while self._reporting:
            left = self._reporting[0].until - self._fences.clock()
            if left > 0 and not self._reporting[0].job.done():
                return left
            self._end(self._reporting.popleft())
        return None

    def close(self) -> None:
        """Wait for what is being stored, at most until its deadline, and report all results."""
        while self._reporting:
            report = self._reporting.popleft()
            wait([report.job], timeout=max(0.0, min(report.until - self._fences.clock(), self._fences.deadline)))
            self._end(report)

    def _end(self, report: _Report) -> None:
        if not report.job.done() or report.job.cancelled():
            for name in report.sequence.actions:
                self._fences.of(name).fault(TimeoutError(f"not done after {self._fences.deadline:g} seconds"))
        report.job.cancel()
        report.sequence.generation.finish(report.result)

    def _store_and_report(self, sequence: QueuedSequence, result: GenerationResult) -> None:
        for name, action in sequence.actions.items():
            self._fences.of(name).run(partial(action, result), None)
        sequence.generation.finish(result)
