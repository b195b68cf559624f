"""The scheduler: decides between steps which requests leave, join and prefill. Runs on the worker's thread.

Requests are admitted first come, first served: a request that does not fit yet waits, and none overtakes it. Prompts
take turns to prefill a bounded number of tokens, so that a long one blocks neither running requests nor other prompts.
"""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter

from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import Emission
from precedent.engine.admission import Admission
from precedent.engine.delivery import Finisher
from precedent.engine.generation import cancelled_error
from precedent.engine.health import Outcomes
from precedent.engine.metrics import EngineMetrics, MetricsRecorder
from precedent.engine.queued_sequence import QueuedSequence
from precedent.errors import PrecedentError, RequestCancelled
from precedent.runtime.failures import OutOfMemory, as_ours
from precedent.runtime.team import fitted_team
from precedent.target import common_prefix
from precedent.target.contract import PREFILL_CHUNK

log = logging.getLogger(__name__)

METRICS = "metrics"
"""The name of the metrics among the aids of an engine."""

SMALLEST_PIECE = 32
"""Smallest remainder of a round's budget, in prompt tokens, that is worth a forward of its own."""

SCORED_ROWS = 128
"""Most prompt tokens that are scored at once: each has a row of the vocabulary's size."""

WORTH_WAITING = 32
"""Shortest common prefix, in tokens, for which a prompt waits for another."""


class Scheduler:
    """All requests of one engine: `waiting` for memory, `prefilling` in turns, `running` together in every step.

    `prefill_tokens` bounds the prompt tokens computed between two steps; `outcomes` records how requests end.
    """

    def __init__(self, loop: DecodeLoop, admission: Admission, finish: Finisher, prefill_tokens: int) -> None:
        self.loop, self.admission, self.finish, self.prefill_tokens = loop, admission, finish, prefill_tokens
        self.target, self.fences = loop.target, loop.aids.fences
        self.outcomes, self.recorder = Outcomes(self.fences.clock), MetricsRecorder()
        self.waiting: deque[QueuedSequence] = deque()
        self.prefilling: deque[QueuedSequence] = deque()
        self.running: list[QueuedSequence] = []

    @property
    def idle(self) -> bool:
        """True if a round would do nothing."""
        return not (self.waiting or self.prefilling or self.running)

    def round(self) -> None:
        """Let requests leave and join, prefill a bounded number of tokens, and run one step for the running ones."""
        self.finish.seconds_left()
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            if sequence.generation.cancelled:
                self._fail(sequence, cancelled_error())
        while self.waiting and self.admission.admits(self.waiting[0]):
            self._join(self.waiting.popleft())
        self._prefill()
        if self.running:
            self._step()

    def fail_all(self, error: PrecedentError) -> None:
        """Fail every request; inform all callers first, in case the clean-up fails."""
        requests = (*self.waiting, *self.prefilling, *self.running)
        for sequence in requests:
            sequence.generation.fail(error)
        for sequence in requests:
            self._leave(sequence, error)

    def metrics(self, num_arriving: int) -> EngineMetrics:
        """A snapshot; `num_arriving` requests are not `waiting` yet. Safe on any thread."""
        return self.recorder.snapshot(
            num_requests_running=len(self.running) + len(self.prefilling),
            num_requests_waiting=num_arriving + len(self.waiting),
            kv_cache_reserved_bytes=self.admission.reserved_bytes,
            kv_cache_idle_bytes=self.admission.idle_bytes,
            kv_cache_max_bytes=self.admission.max_kv_bytes,
            degraded=self.fences.degraded(),
            faults=self.fences.faults(),
        )

    def longest_wait(self) -> float:
        """Seconds for which the first waiting request has waited. Safe on any thread."""
        try:
            return max(0.0, perf_counter() - self.waiting[0].submitted)
        except IndexError:
            return 0.0

    # Joining

    def _join(self, sequence: QueuedSequence) -> None:
        self._note_shared_prefix(sequence)
        self.prefilling.append(sequence)
        try:
            sequence.stats.queue_seconds = perf_counter() - sequence.submitted
            self.admission.enter(sequence)
            sequence.begin(self.target, self.fences)
        except Exception as error:
            self._fail(sequence, as_ours(error, "starting the request"))

    def _note_shared_prefix(self, sequence: QueuedSequence) -> None:
        """Record the prompt being computed with the longest common prefix.

        It must be of the same tenant, because timing would reveal another tenant's prompt.
        """
        for other in self.prefilling:
            if other.request.tenant == sequence.request.tenant:
                shared = common_prefix(sequence.reusable_ids[:-1], other.prompt_ids[:-1])
                if shared > max(sequence.num_shared, WORTH_WAITING):
                    sequence.num_shared, sequence.shares_with = shared, other

    def _prefill(self) -> None:
        """Prefill prompts in turns within the round's budget: a whole chunk, or less beside running requests."""
        spent = 0
        while self.prefilling:
            # one always exists: a sequence waits only for earlier ones
            sequence = next(each for each in self.prefilling if not self._waits(each))
            left = (self.prefill_tokens if self.running else PREFILL_CHUNK) - spent
            if spent and left < min(SMALLEST_PIECE, sequence.num_missing):
                return
            spent += self._prefill_piece(sequence, max(left, 1))

    def _waits(self, sequence: QueuedSequence) -> bool:
        """Whether another prompt is still computing the tokens that both begin with."""
        other = sequence.shares_with
        if sequence.started or other is None or other.num_prefilled >= sequence.num_shared:
            return False
        return other in self.prefilling

    def _prefill_piece(self, sequence: QueuedSequence, most: int) -> int:
        """Compute at most `most` tokens of a prompt and end its turn; returns the number computed."""
        started, number = perf_counter(), 0
        try:
            if not sequence.started:
                self._start(sequence)
            number = min(most, sequence.num_missing)
            if sequence.scores is not None:
                number = min(number, SCORED_ROWS, self.target.capabilities.most_rows or SCORED_ROWS)
            until_kept = sequence.prefix_tokens - sequence.num_prefilled
            if until_kept > 0 and not self.target.capabilities.rewinds_anywhere:  # it goes back to ends of pieces
                number = min(number, until_kept)
            ready = sequence.prefill(self.target, number)
        except Exception as error:
            log.debug("prefill failed", exc_info=True)
            self._fail(sequence, as_ours(error, f"prefilling a prompt of {len(sequence.prompt_ids)} tokens"))
            return number
        sequence.num_prefilled += number
        sequence.stats.prefill_seconds += perf_counter() - started
        self.prefilling.remove(sequence)
        (self.running if ready else self.prefilling).append(sequence)
        if ready and not sequence.max_tokens:
            sequence.finish_reason = "length"
            self._deliver(sequence, Emission())
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
            for sequence in running:
                self._fail(sequence, as_ours(error, "stepping"))
            return
        seconds = perf_counter() - started
        tokens = sum(len(result.token_ids) for result in results)
        self.fences.of(METRICS).run(lambda: self.recorder.stepped(len(running), tokens), None)
        for sequence, result in zip(running, results, strict=True):
            sequence.stats.decode_seconds += seconds
            sequence.stats.plain_seconds += len(result.token_ids) * plain
            self._deliver(sequence, result)

    def _deliver(self, sequence: QueuedSequence, result: Emission) -> None:
        if sequence.error is None:
            try:
                sequence.deliver(result)
            except Exception as error:
                sequence.fail(error, "turning tokens into text")
        if sequence.error is not None:
            self._fail(sequence, sequence.error)
        elif sequence.finished:
            answer = sequence.result()
            self._leave(sequence, None)
            self.finish(sequence, answer)

    # Leaving

    def _fail(self, sequence: QueuedSequence, error: PrecedentError) -> None:
        self._leave(sequence, error)
        if isinstance(error, OutOfMemory):
            self.admission.drop_idle()
        sequence.generation.fail(error)

    def _leave(self, sequence: QueuedSequence, error: PrecedentError | None) -> None:
        """Remove the request from its queue, release what it held and count how it ended."""
        cancelled = isinstance(error, RequestCancelled)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            (self.running if sequence in self.running else self.prefilling).remove(sequence)
            sequence.end(self.fences)
            self.admission.leave(sequence, keep=error is None or cancelled)  # after other errors no slot is safe
            sequence.release_slot()
        self.outcomes.note(error)
        how = "finished" if error is None else "cancelled" if cancelled else "failed"
        stats, prompt_tokens, cached = sequence.stats, len(sequence.prompt_ids), sequence.cached_prompt_tokens
        self.fences.of(METRICS).run(lambda: self.recorder.ended(how, stats, prompt_tokens, cached), None)
