"""Delivers a step's tokens to the caller: text, times and, at the end, the result."""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from time import perf_counter

from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.engine.generation import Emission, GenerationResult
from precedent.engine.in_flight import InFlight

log = logging.getLogger(__name__)


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


def store_and_finish(request: InFlight, result: GenerationResult) -> None:
    """Store the completion, then report it, so that a reported completion is a stored one.

    A failure to store is logged; it does not fail the answer.
    """
    for action in request.finished:
        try:
            action(result)
        except Exception as error:
            log.warning("the completion was not stored: %s", error, exc_info=log.isEnabledFor(logging.DEBUG))
    request.generation.finish(result)


def finish_on(executor: Executor, request: InFlight, result: GenerationResult) -> None:
    """Store and report on another thread, because storing waits for the disk; at interpreter exit, on this one."""
    try:
        executor.submit(store_and_finish, request, result)
    except RuntimeError:
        store_and_finish(request, result)
