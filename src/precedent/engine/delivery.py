"""The normal end of a request: call the observer, store the completion, then report the result to its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial

from precedent.cache import Completion
from precedent.engine.generation import GenerationResult
from precedent.engine.queued_sequence import QueuedSequence
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


class Finisher:
    """Stores completions on another thread and reports them, at the latest after the fences' deadline.

    So a reported completion is a stored one, unless storing fails, is switched off or takes too long: none of these
    fails or delays an answer further. All methods belong to the worker's thread.
    """

    def __init__(self, executor: Executor, fences: Fences) -> None:
        self._executor, self._fences = executor, fences
        self._reporting: deque[tuple[float, Callable[[], None], list[Future[object]]]] = deque()

    def __call__(self, sequence: QueuedSequence, result: GenerationResult) -> None:
        """Store and report the result of a sequence."""
        report, jobs = partial(sequence.generation.finish, result), list[Future[object]]()
        for name, action in sequence.actions.items():
            fence = self._fences.of(name)
            if not fence.is_on:
                continue
            job = fence.submit(self._executor, action, result)
            if job is not None:
                jobs.append(job)
            else:  # the interpreter is exiting
                fence.run(partial(action, result), None)
        if jobs:
            self._reporting.append((self._fences.clock() + self._fences.deadline, report, jobs))
        else:  # behind another that is being stored it would be reported as late as that
            report()
        for job in jobs:
            job.add_done_callback(lambda _: report() if all(each.done() for each in jobs) else None)
        self.seconds_left()

    def seconds_left(self) -> float | None:
        """Report what takes too long to store; returns the seconds until the next deadline, None without one."""
        while self._reporting:
            until, report, jobs = self._reporting[0]
            left = until - self._fences.clock()
            if left > 0 and not all(job.done() for job in jobs):
                return left
            self._reporting.popleft()
            report()
        return None

    def close(self) -> None:
        """Wait for what is being stored, at most until its deadline, and report all results."""
        if self._reporting:
            self._fences.settle()
        for _, report, _ in self._reporting:
            report()
        self._reporting.clear()
