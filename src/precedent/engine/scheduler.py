"""The scheduler: decides between steps which requests leave, join and prefill. Runs on the worker's thread.

Requests are admitted first come, first served: a request that does not fit yet waits, and none overtakes it. Prompts
take turns to prefill a bounded number of tokens, so that a long one blocks neither running requests nor other prompts.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from precedent.decoding.aids import Aids
from precedent.decoding.beside import NOTHING, Beside
from precedent.decoding.loop import step
from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.drafters.together import end_all
from precedent.engine.admission import Admission
from precedent.engine.delivery import Finisher, deliver, result_of
from precedent.engine.generation import cancelled_error
from precedent.engine.health import Outcomes, is_internal
from precedent.engine.in_flight import InFlight, begin
from precedent.engine.metrics import EngineMetrics, MetricsRecorder
from precedent.engine.turns import next_prompt, note_shared_prefix
from precedent.errors import PrecedentError, RequestCancelled
from precedent.planning.planner import Planner
from precedent.runtime.failures import OutOfMemory, as_ours
from precedent.runtime.fence import Fences
from precedent.runtime.team import fitted_team
from precedent.target import Target
from precedent.target.contract import PREFILL_CHUNK

log = logging.getLogger(__name__)

METRICS = "metrics"
"""The name of the metrics among the aids of an engine."""

SMALLEST_PIECE = 32
"""Smallest remainder of a round's budget, in prompt tokens, that is worth a forward of its own."""


@dataclass(slots=True)
class Scheduler:
    """All requests of one engine: `waiting` for memory, `prefilling` in turns, `running` together in every step.

    `prefill_tokens` bounds the prompt tokens computed between two steps; `beside` runs while the target model scores.
    What only makes answers faster stands behind `fences`; `outcomes` hears how requests end.
    """

    target: Target
    planner: Planner
    admission: Admission
    prefill_tokens: int
    finish: Finisher
    beside: Beside = NOTHING
    fences: Fences = field(default_factory=Fences)
    outcomes: Outcomes = field(default_factory=Outcomes)
    waiting: deque[InFlight] = field(default_factory=deque)
    prefilling: deque[InFlight] = field(default_factory=deque)
    running: list[InFlight] = field(default_factory=list)
    recorder: MetricsRecorder = field(default_factory=MetricsRecorder)

    @property
    def idle(self) -> bool:
        """True if a round would do nothing."""
        return not (self.waiting or self.prefilling or self.running)

    def add(self, request: InFlight) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def round(self) -> None:
        """Let requests leave and join, prefill a bounded number of tokens, and run one step for the running ones."""
        self.finish.report_overdue()
        self._drop_cancelled()
        self._admit()
        self._prefill()
        if self.running:
            self._step()

    def fail_all(self, error: PrecedentError) -> None:
        """Fail every request; inform all callers first, in case the clean-up fails."""
        requests = (*self.waiting, *self.prefilling, *self.running)
        for request in requests:
            request.generation.fail(error)
        for request in requests:
            self._leave(request, _how(error), keep_slot=False)

    def metrics(self, num_arriving: int) -> EngineMetrics:
        """A snapshot; `num_arriving` requests have not reached `add` yet. Safe on any thread."""
        return self.recorder.snapshot(
            running=len(self.running) + len(self.prefilling),
            waiting=num_arriving + len(self.waiting),
            reserved=self.admission.reserved_bytes,
            idle=self.admission.idle_bytes,
            most=self.admission.max_kv_bytes,
            fences=self.fences,
        )

    def longest_wait(self, now: float) -> float:
        """Seconds for which the first waiting request has waited at `perf_counter` time `now`. Safe on any thread."""
        try:
            return max(0.0, now - self.waiting[0].submitted)
        except IndexError:
            return 0.0

    # Joining

    def _admit(self) -> None:
        while self.waiting and self.admission.admits(self.waiting[0]):
            request = self.waiting.popleft()
            note_shared_prefix(request, self.prefilling)
            self.prefilling.append(request)
            try:
                self._enter(request)
            except Exception as error:
                self._fail(request, as_ours(error, "starting the request"))

    def _enter(self, request: InFlight) -> None:
        """Reserve memory and begin the drafters."""
        request.stats.queue_seconds = perf_counter() - request.submitted
        self.admission.enter(request)
        begin(request, self.target, self.fences)

    def _prefill(self) -> None:
        """Prefill prompts in turns within the round's budget: a whole chunk, or less beside running requests."""
        spent = 0
        while self.prefilling:
            request = next_prompt(self.prefilling)
            left = (self.prefill_tokens if self.running else PREFILL_CHUNK) - spent
            if spent and left < min(SMALLEST_PIECE, request.num_missing):
                return
            spent += self._prefill_piece(request, max(left, 1))

    def _prefill_piece(self, request: InFlight, most: int) -> int:
        """Compute at most `most` tokens of a prompt and end its turn; returns the number computed."""
        started, number = perf_counter(), 0
        try:
            if not request.started:
                self._start(request)
            number = min(most, request.num_missing)
            until_kept = request.prefix_tokens - request.num_prefilled
            if until_kept > 0 and not self.target.capabilities.rewinds_anywhere:  # it goes back to ends of pieces
                number = min(number, until_kept)
            ready = self.target.continue_prefill(_sequence(request).slot, request.prompt_ids, max(number, 1))
        except Exception as error:
            log.debug("prefill failed", exc_info=True)
            self._fail(request, as_ours(error, f"prefilling a prompt of {len(request.prompt_ids)} tokens"))
            return number
        request.num_prefilled += number
        request.stats.prefill_seconds += perf_counter() - started
        self.prefilling.remove(request)
        (self.running if ready else self.prefilling).append(request)
        return number

    def _start(self, request: InFlight) -> None:
        """Take the slot that holds most of the prompt, and rewind it to their common prefix."""
        sequence = _sequence(request)
        sequence.slot = self.admission.slot_for(request)
        request.started, request.shares_with = True, None
        request.num_prefilled = self.target.begin_prefill(sequence.slot, request.prompt_ids)
        request.cached_prompt_tokens = request.num_prefilled

    # Running

    def _step(self) -> None:
        """Run one step for all running requests. A sequence that fails carries its error and fails alone."""
        running, started = list(self.running), perf_counter()
        plain = Aids(self.planner, self.beside, self.fences).plain_seconds(len(running))
        sequences = [_sequence(request) for request in running]
        try:
            with fitted_team(self.target.team):  # drafts and verification wait for lost threads as forwards do
                results = step(sequences, self.target, self.planner, self.beside, self.fences)
        except Exception as error:  # raised by the loop itself, so it cannot be assigned to one request
            self._fail_running(as_ours(error, "stepping"))
            return
        seconds = perf_counter() - started
        tokens = sum(len(result.token_ids) for result in results)
        self.fences.of(METRICS).run(lambda: self.recorder.stepped(len(running), tokens), None)
        for request, result in zip(running, results, strict=True):
            request.stats.decode_seconds += seconds
            request.stats.plain_seconds += len(result.token_ids) * plain
            self._deliver(request, result)

    def _fail_running(self, error: PrecedentError) -> None:
        for request in list(self.running):
            self._fail(request, error)

    def _deliver(self, request: InFlight, result: StepResult) -> None:
        sequence = _sequence(request)
        if sequence.error is None:
            try:
                deliver(request, sequence, result)
            except Exception as error:
                sequence.error = as_ours(error, "turning tokens into text")
        if sequence.error is not None:
            self._fail(request, sequence.error)
        elif sequence.finished:
            self._retire(request)

    # Leaving

    def _drop_cancelled(self) -> None:
        for request in (*self.waiting, *self.prefilling, *self.running):
            if request.generation.cancelled:
                self._fail(request, cancelled_error())

    def _retire(self, request: InFlight) -> None:
        result = result_of(request, _sequence(request))
        self._leave(request, "finished", keep_slot=True)
        self.outcomes.note(internal=False)
        self.finish(request, result)

    def _fail(self, request: InFlight, error: PrecedentError) -> None:
        """Remove a request and pass the error to its caller; only a cancelled request's slot is safe to keep."""
        self._leave(request, _how(error), keep_slot=isinstance(error, RequestCancelled))
        self.outcomes.note(internal=is_internal(error))
        if isinstance(error, OutOfMemory):
            self.admission.drop_idle()
        request.generation.fail(error)

    def _leave(self, request: InFlight, how: str, *, keep_slot: bool) -> None:
        """Remove the request from its queue and release what it held."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            (self.running if request in self.running else self.prefilling).remove(request)
            sequence, request.sequence = request.sequence, None
            end_all(sequence.sessions if sequence else {}, self.fences)
            self.admission.leave(request, sequence if request.started else None, keep=keep_slot)
        stats, prompt_tokens, cached = request.stats, len(request.prompt_ids), request.cached_prompt_tokens
        self.fences.of(METRICS).run(lambda: self.recorder.ended(how, stats, prompt_tokens, cached), None)


def _how(error: PrecedentError) -> str:
    """How a request with this error ended, for the metrics."""
    return "cancelled" if isinstance(error, RequestCancelled) else "failed"


def _sequence(request: InFlight) -> DecodingSequence:
    assert request.sequence is not None
    return request.sequence
