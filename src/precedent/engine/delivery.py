"""Delivers a step's tokens to the caller: text, times and, at the end, the result."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future, wait
from functools import partial
from time import perf_counter

from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.engine.generation import Emission, GenerationResult
from precedent.engine.in_flight import InFlight
from precedent.runtime.fence import Fences


def deliver(request: InFlight, sequence: DecodingSequence, result: StepResult) -> None:
    """Pass a step's tokens to the caller. A stop string cuts the answer and ends the sequence."""
    text, kept = request.text.push(result.token_ids)
    if kept < len(result.token_ids) or request.text.stopped:
        del sequence.output_ids[len(sequence.output_ids) - len(result.token_ids) + kept :]
        sequence.finish_reason = "stop"
    if sequence.finished:
        text += request.text.flush()
        sequence.finish_reason = "stop" if request.text.stopped else sequence.finish_reason
    _note_time(request, kept)
    request.answer.append(text)
    request.sources.extend(result.sources[:kept])
    request.logprobs.extend(result.logprobs[:kept])
    request.generation.put(Emission(text, result.token_ids[:kept], result.sources[:kept], result.logprobs[:kept]))


def _note_time(request: InFlight, num_tokens: int) -> None:
    now = perf_counter()
    if request.last_emission:
        request.stats.inter_token.observe(now - request.last_emission, num_tokens)
    else:
        request.stats.first_token_seconds = now - request.submitted
    request.last_emission = now


def result_of(request: InFlight, sequence: DecodingSequence) -> GenerationResult:
    """The result of a sequence that ended normally."""
    assert sequence.finish_reason is not None
    request.stats.total_seconds = perf_counter() - request.submitted
    return GenerationResult(
        text="".join(request.answer),
        token_ids=tuple(sequence.output_ids),
        sources=tuple(request.sources),
        finish_reason=sequence.finish_reason,
        prompt_tokens=len(request.prompt_ids),
        cached_prompt_tokens=request.cached_prompt_tokens,
        stats=request.stats,
        logprobs=tuple(request.logprobs),
    )


class Finisher:
    """Stores completions on another thread and reports them, at the latest after a deadline.

    So a reported completion is a stored one, unless storing fails, is switched off or takes too long: none of these
    fails or delays an answer further. All methods belong to the worker's thread.
    """

    def __init__(self, executor: Executor, fences: Fences) -> None:
        self._executor, self._fences = executor, fences
        self._reporting: deque[tuple[float, InFlight, GenerationResult, Future[None]]] = deque()

    def __call__(self, request: InFlight, result: GenerationResult) -> None:
        """Store and report the result of a request."""
        if not any(self._fences.of(name).is_on for name in request.finished):
            request.generation.finish(result)
            return
        try:
            job = self._executor.submit(self._store_and_report, request, result)
        except RuntimeError:  # the interpreter is exiting
            self._store_and_report(request, result)
            return
        self._reporting.append((self._fences.clock() + self._fences.deadline, request, result, job))

    def seconds_left(self) -> float | None:
        """Seconds until the next deadline; None if nothing is being stored."""
        self.report_overdue()
        return max(0.0, self._reporting[0][0] - self._fences.clock()) if self._reporting else None

    def report_overdue(self) -> None:
        """Report results whose completions take too long to store."""
        while self._reporting and (self._reporting[0][3].done() or self._fences.clock() >= self._reporting[0][0]):
            _, request, result, job = self._reporting.popleft()
            self._end(request, result, job)

    def close(self) -> None:
        """Wait for what is being stored, at most until its deadline, and report all results."""
        while self._reporting:
            until, request, result, job = self._reporting.popleft()
            wait([job], timeout=max(0.0, min(until - self._fences.clock(), self._fences.deadline)))
            self._end(request, result, job)

    def _end(self, request: InFlight, result: GenerationResult, job: Future[None]) -> None:
        if not job.done() or job.cancelled():
            for name in request.finished:
                self._fences.of(name).fault(TimeoutError(f"not done after {self._fences.deadline:g} seconds"))
        job.cancel()
        request.generation.finish(result)

    def _store_and_report(self, request: InFlight, result: GenerationResult) -> None:
        for name, action in request.finished.items():
            self._fences.of(name).run(partial(action, result), None)
        request.generation.finish(result)
