"""The scheduler: decides between steps which requests leave, join and prefill. Runs on the worker's thread.

Requests are admitted first come, first served: a request that does not fit yet waits, and none overtakes it. Prompts
take turns to prefill a bounded number of tokens, so that a long one blocks neither running requests nor other prompts.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import StepResult
from precedent.engine.admission import Admission
from precedent.engine.delivery import Finisher
from precedent.engine.generation import cancelled_error
from precedent.engine.health import Outcomes, is_internal
from precedent.engine.metrics import EngineMetrics, MetricsRecorder
from precedent.engine.sequence import QueuedSequence, next_prompt, note_shared_prefix
from precedent.errors import PrecedentError, RequestCancelled
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

    `prefill_tokens` bounds the prompt tokens computed between two steps; `outcomes` records how requests end.
    """

    loop: DecodeLoop
    admission: Admission
    prefill_tokens: int
    finish: Finisher
    outcomes: Outcomes = field(default_factory=Outcomes)
    waiting: deque[QueuedSequence] = field(default_factory=deque)
    prefilling: deque[QueuedSequence] = field(default_factory=deque)
    running: list[QueuedSequence] = field(default_factory=list)
    recorder: MetricsRecorder = field(default_factory=MetricsRecorder)

    @property
    def target(self) -> Target:
        """The model that all requests share."""
        return self.loop.target

    @property
    def fences(self) -> Fences:
        """The fences around what only makes answers faster."""
        return self.loop.aids.fences

    @property
    def idle(self) -> bool:
        """True if a round would do nothing."""
        return not (self.waiting or self.prefilling or self.running)

    def add(self, sequence: QueuedSequence) -> None:
        """Queue a request behind all others."""
        self.waiting.append(sequence)

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
        for sequence in requests:
            sequence.generation.fail(error)
        for sequence in requests:
            self._leave(sequence, _how(error), keep_slot=False)

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
            sequence = self.waiting.popleft()
            note_shared_prefix(sequence, self.prefilling)
            self.prefilling.append(sequence)
            try:
                self._enter(sequence)
            except Exception as error:
                self._fail(sequence, as_ours(error, "starting the request"))

    def _enter(self, sequence: QueuedSequence) -> None:
        """Reserve memory and begin the drafters."""
        sequence.stats.queue_seconds = perf_counter() - sequence.submitted
        self.admission.enter(sequence)
        sequence.begin(self.target, self.fences)

    def _prefill(self) -> None:
        """Prefill prompts in turns within the round's budget: a whole chunk, or less beside running requests."""
        spent = 0
        while self.prefilling:
            sequence = next_prompt(self.prefilling)
            left = (self.prefill_tokens if self.running else PREFILL_CHUNK) - spent
            if spent and left < min(SMALLEST_PIECE, sequence.num_missing):
                return
            spent += self._prefill_piece(sequence, max(left, 1))

    def _prefill_piece(self, sequence: QueuedSequence, most: int) -> int:
        """Compute at most `most` tokens of a prompt and end its turn; returns the number computed."""
        started, number = perf_counter(), 0
        try:
            if not sequence.started:
                self._start(sequence)
            number = min(most, sequence.num_missing)
            until_kept = sequence.prefix_tokens - sequence.num_prefilled
            if until_kept > 0 and not self.target.capabilities.rewinds_anywhere:  # it goes back to ends of pieces
                number = min(number, until_kept)
            ready = self.target.continue_prefill(sequence.slot, sequence.prompt_ids, max(number, 1))
        except Exception as error:
            log.debug("prefill failed", exc_info=True)
            self._fail(sequence, as_ours(error, f"prefilling a prompt of {len(sequence.prompt_ids)} tokens"))
            return number
        sequence.num_prefilled += number
        sequence.stats.prefill_seconds += perf_counter() - started
        self.prefilling.remove(sequence)
        (self.running if ready else self.prefilling).append(sequence)
        return number

    def _start(self, sequence: QueuedSequence) -> None:
        """Take the slot that holds most of the prompt, and rewind it to their common prefix."""
        sequence.slot = self.admission.slot_for(sequence)
        sequence.started, sequence.shares_with = True, None
        sequence.num_prefilled = self.target.begin_prefill(sequence.slot, sequence.prompt_ids)
        sequence.cached_prompt_tokens = sequence.num_prefilled

    # Running

    def _step(self) -> None:
        """Run one step for all running requests. A sequence that fails carries its error and fails alone."""
        running, started = list(self.running), perf_counter()
        plain = self.loop.aids.plain_seconds(len(running))
        try:
            with fitted_team(self.target.team):  # drafts and verification wait for lost threads as forwards do
                results = self.loop.step(running)
        except Exception as error:  # raised by the loop itself, so it cannot be assigned to one request
            self._fail_running(as_ours(error, "stepping"))
            return
        seconds = perf_counter() - started
        tokens = sum(len(result.token_ids) for result in results)
        self.fences.of(METRICS).run(lambda: self.recorder.stepped(len(running), tokens), None)
        for sequence, result in zip(running, results, strict=True):
            sequence.stats.decode_seconds += seconds
            sequence.stats.plain_seconds += len(result.token_ids) * plain
            self._deliver(sequence, result)

    def _fail_running(self, error: PrecedentError) -> None:
        for sequence in list(self.running):
            self._fail(sequence, error)

    def _deliver(self, sequence: QueuedSequence, result: StepResult) -> None:
        if sequence.error is None:
            try:
                sequence.deliver(result)
            except Exception as error:
                sequence.fail(error, "turning tokens into text")
        if sequence.error is not None:
            self._fail(sequence, sequence.error)
        elif sequence.finished:
            self._retire(sequence)

    # Leaving

    def _drop_cancelled(self) -> None:
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            if sequence.generation.cancelled:
                self._fail(sequence, cancelled_error())

    def _retire(self, sequence: QueuedSequence) -> None:
        result = sequence.result()
        self._leave(sequence, "finished", keep_slot=True)
        self.outcomes.note(internal=False)
        self.finish(sequence, result)

    def _fail(self, sequence: QueuedSequence, error: PrecedentError) -> None:
        """Remove a request and pass the error to its caller; only a cancelled request's slot is safe to keep."""
        self._leave(sequence, _how(error), keep_slot=isinstance(error, RequestCancelled))
        self.outcomes.note(internal=is_internal(error))
        if isinstance(error, OutOfMemory):
            self.admission.drop_idle()
        sequence.generation.fail(error)

    def _leave(self, sequence: QueuedSequence, how: str, *, keep_slot: bool) -> None:
        """Remove the request from its queue and release what it held."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            (self.running if sequence in self.running else self.prefilling).remove(sequence)
            sequence.end(self.fences)
            self.admission.leave(sequence, keep=keep_slot)
            sequence.release_slot()
        stats, prompt_tokens, cached = sequence.stats, len(sequence.prompt_ids), sequence.cached_prompt_tokens
        self.fences.of(METRICS).run(lambda: self.recorder.ended(how, stats, prompt_tokens, cached), None)


def _how(error: PrecedentError) -> str:
    """How a request with this error ended, for the metrics."""
    return "cancelled" if isinstance(error, RequestCancelled) else "failed"
