"""The one thread that owns the target model: it admits requests, steps all running ones together, and retires them."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from time import perf_counter

import torch

from precedent.config import SamplingParams, SpeculationConfig
from precedent.constraints import constraints_for
from precedent.decode import StepResult, step
from precedent.drafters import Drafter, Drafting, DraftRequest
from precedent.errors import GenerationError, PrecedentError
from precedent.generation import Emission, Generation, GenerationResult, cancelled_error
from precedent.planner import Planner
from precedent.sequence import DecodingSequence, entropy_coins
from precedent.stats import GenerationStats
from precedent.target import TargetModel
from precedent.target.prefix_pool import PrefixPool
from precedent.text.assembly import TextAssembler

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """What the worker needs to know about a request, and the handle its caller holds."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationConfig
    mode: str
    drafters: dict[str, Drafter]
    text: TextAssembler
    tenant: str
    query: str
    workflow_step: str
    finished: Sequence[Callable[[GenerationResult], None]]
    generation: Generation = field(default_factory=Generation)
    submitted: float = field(default_factory=perf_counter)
    sequence: DecodingSequence | None = None
    cached_prompt_tokens: int = 0
    answer: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


class Worker:
    """Runs `decode.step` on its own thread. It knows nothing of the engine, so that dropping the engine stops it."""

    def __init__(
        self, target: TargetModel, planner: Planner, end_token_ids: frozenset[int], num_tokens: int, executor: Executor
    ) -> None:
        self._target, self._planner, self._executor = target, planner, executor
        self._end_token_ids, self._num_tokens = end_token_ids, num_tokens
        self._pool = PrefixPool(target)
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._running: list[Request] = []
        self._thread = threading.Thread(target=self._run, name="precedent-worker", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted before the next step."""
        self._inbox.put(request)

    def stop(self) -> None:
        """End the thread after the current step; running requests fail with RequestCancelled."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        while self._admit():
            self._drop_cancelled()
            if self._running:
                self._step()
        for request in list(self._running):  # _fail takes it out of the list
            self._fail(request, cancelled_error())

    def _admit(self) -> bool:
        """Start every waiting request, blocking while nothing runs; False when the worker should end."""
        while not self._running or not self._inbox.empty():
            request = self._inbox.get()
            if request is None:
                return False
            self._start(request)
        return True

    def _start(self, request: Request) -> None:
        if request.generation.cancelled:
            request.generation.fail(cancelled_error())
            return
        try:
            request.sequence = self._prefilled(request)
            self._running.append(request)
        except Exception as error:
            log.debug("prefill failed", exc_info=True)
            request.generation.fail(_as_ours(error))

    def _prefilled(self, request: Request) -> DecodingSequence:
        """Begin the drafters (recall embeds meanwhile), prefill, and build the sequence."""
        started = perf_counter()
        shape = constraints_for(request.sampling, request.prompt_ids, self._num_tokens, self._target.vocab_size)
        draft_request = DraftRequest(
            request_id=hex(id(request)),
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            tenant=request.tenant,
            query=request.query,
            workflow_step=request.workflow_step,
            mode=request.mode,
            shape=shape,
            end_token_ids=self._end_token_ids,
        )
        draftings = {name: drafter.begin(draft_request) for name, drafter in request.drafters.items()}
        slot = self._pool.acquire(request.tenant, request.prompt_ids)
        try:
            request.cached_prompt_tokens = self._target.prefill(slot, request.prompt_ids)
        except BaseException:
            self._pool.release(request.tenant, slot)
            _end_all(draftings.values())
            raise
        stats = GenerationStats(mode=request.mode, prefill_seconds=perf_counter() - started)
        room = self._target.context_length - len(request.prompt_ids)
        return DecodingSequence(
            slot=slot,
            sampling=request.sampling,
            speculation=request.speculation,
            mode=request.mode,
            coins_of=entropy_coins(secrets.randbits(128)),
            end_token_ids=self._end_token_ids,
            max_tokens=min(request.sampling.max_tokens, room),
            shape=shape,
            draftings=draftings,
            draw_sources=tuple(name for name, drafter in request.drafters.items() if drafter.draws),
            stats=stats,
        )

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._running if r.generation.cancelled]:
            self._fail(request, cancelled_error())

    def _step(self) -> None:
        """One step for all running requests; an error of the step itself fails them, not the worker."""
        running, started = list(self._running), perf_counter()
        try:
            results = step([_sequence(r) for r in running], self._target, self._planner)
        except Exception as error:
            log.debug("step failed", exc_info=True)
            for request in running:
                self._fail(request, _as_ours(error))
            return
        seconds = perf_counter() - started
        for request, result in zip(running, results, strict=True):
            self._deliver(request, result, seconds)

    def _deliver(self, request: Request, result: StepResult, seconds: float) -> None:
        """Hand a step's tokens to the caller, and retire the request when it is over."""
        sequence = _sequence(request)
        sequence.stats.decode_seconds += seconds
        if sequence.error is not None:
            self._fail(request, sequence.error)
            return
        text, kept = request.text.push(result.token_ids)
        if kept < len(result.token_ids) or request.text.stopped:
            del sequence.output_ids[len(sequence.output_ids) - len(result.token_ids) + kept :]
            sequence.finish_reason = "stop"
        if sequence.finished:
            text += request.text.flush()
            sequence.finish_reason = "stop" if request.text.stopped else sequence.finish_reason
        if sequence.stats.num_steps == 1:
            sequence.stats.first_token_seconds = perf_counter() - request.submitted
        request.answer.append(text)
        request.sources.extend(result.sources[:kept])
        request.generation.put(Emission(text, result.token_ids[:kept], result.sources[:kept]))
        if sequence.finished:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Free the slot, then store the completion and report the end on another thread: storing waits for the disk."""
        sequence = self._release(request)
        sequence.stats.total_seconds = perf_counter() - request.submitted
        assert sequence.finish_reason is not None
        result = GenerationResult(
            text="".join(request.answer),
            token_ids=tuple(sequence.output_ids),
            sources=tuple(request.sources),
            finish_reason=sequence.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            cached_prompt_tokens=request.cached_prompt_tokens,
            stats=sequence.stats,
        )
        self._executor.submit(_store_and_finish, request, result)

    def _fail(self, request: Request, error: BaseException) -> None:
        self._release(request)
        request.generation.fail(error)

    def _release(self, request: Request) -> DecodingSequence:
        sequence = _sequence(request)
        self._running.remove(request)
        _end_all(sequence.draftings.values())
        self._pool.release(request.tenant, sequence.slot)
        return sequence


def _store_and_finish(request: Request, result: GenerationResult) -> None:
    """Store first: a completion that was reported is a completion that is stored. A full disk fails no answer."""
    for action in request.finished:
        try:
            action(result)
        except Exception as error:
            log.warning("the completion was not stored: %s", error, exc_info=log.isEnabledFor(logging.DEBUG))
    request.generation.finish(result)


def _sequence(request: Request) -> DecodingSequence:
    assert request.sequence is not None
    return request.sequence


def _end_all(draftings: Iterable[Drafting]) -> None:
    for drafting in draftings:
        drafting.end()


def _as_ours(error: Exception) -> Exception:
    if isinstance(error, PrecedentError):
        return error
    failure = GenerationError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
