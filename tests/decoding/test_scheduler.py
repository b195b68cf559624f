"""The scheduler, driven by hand: who joins, whose prompt is computed, who leaves, and what they hold meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from helpers.scheduling import (
    WatchedTarget,
    answer_alone,
    error_of,
    nothing_is_held,
    prompt_of,
    request_for,
    run,
    scheduler_on,
)

from precedent.config import EngineLimits
from precedent.decoding.loop import DecodeLoop
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.engine.queued_sequence import QueuedSequence
from precedent.engine.scheduler import Scheduler
from precedent.errors import GenerationError, RequestCancelled
from precedent.planning.planner import Planner
from precedent.runtime.failures import OutOfMemory
from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers
from precedent_testing.drafters import NullDrafter, OracleDrafter, RandomDrafter


def add(scheduler: Scheduler, *requests: QueuedSequence) -> None:
    scheduler.waiting.extend(requests)


def until_all_run(scheduler: Scheduler, number: int) -> None:
    while len(scheduler.running) < number:
        scheduler.round()


# Joining


def test_requests_of_every_length_get_the_answers_they_get_alone(target: WatchedTarget) -> None:
    """Joining and leaving between steps changes no text."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=32, max_running=5))
    lengths = [1, 2, 33, 300, 7, 64, 5, 1, 120]
    requests = [request_for(target, prompt_of(n, i), max_tokens=4 + i) for i, n in enumerate(lengths)]
    for number, request in enumerate(requests):
        add(scheduler, request)
        if number % 3 == 2:
            scheduler.round()
    run(scheduler)
    for number, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        assert request.generation.result().token_ids == answer_alone(prompt_of(length, number), 4 + number)
    assert nothing_is_held(scheduler)
    assert 1 < max(target.batches) <= 5


def test_a_long_prompt_is_computed_in_pieces_between_the_steps_of_others(target: WatchedTarget) -> None:
    """While somebody runs, no round computes more than its share, and every round brings the runner a token."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40))
    runner = request_for(target, prompt_of(5), RandomDrafter(259), max_tokens=200)
    add(scheduler, runner)
    scheduler.round()
    target.pieces.clear()
    newcomer = request_for(target, prompt_of(400, 1))
    add(scheduler, newcomer)
    emitted = []
    while newcomer not in scheduler.running:
        before = runner.stats.num_steps
        scheduler.round()
        emitted.append(runner.stats.num_steps - before)
    assert target.pieces == [40] * 9 + [39]
    assert emitted == [1] * 10


def with_tail(system: Sequence[int], number: int) -> list[int]:
    return [*system, 200 + number, *range(10, 10 + 3 * number)]


@pytest.mark.parametrize("running", [False, True], ids=["nobody runs", "beside a runner"])
def test_a_common_beginning_is_computed_once(target: WatchedTarget, running: bool) -> None:
    """The branches of a graph under one system prompt: the others wait for it, then go on from a copy."""
    scheduler, system = scheduler_on(target, EngineLimits(prefill_tokens_per_round=64)), prompt_of(300)
    if running:
        add(scheduler, request_for(target, prompt_of(5, 90), max_tokens=200))
        scheduler.round()
    target.pieces.clear()
    requests = [request_for(target, with_tail(system, i)) for i in range(5)]
    add(scheduler, *requests)
    run(scheduler)
    assert sum(target.pieces) == sum(len(r.prompt_ids) - 1 for r in requests) - 4 * 300
    assert [r.generation.result().cached_prompt_tokens for r in requests] == [0, 300, 300, 300, 300]
    assert all(r.generation.result().token_ids == answer_alone(r.prompt_ids) for r in requests)
    assert nothing_is_held(scheduler)


def test_a_common_beginning_is_not_shared_across_tenants(target: WatchedTarget) -> None:
    """How fast a prompt is computed would tell whether somebody else sent it."""
    scheduler, system = scheduler_on(target), prompt_of(300)
    first, second = (request_for(target, with_tail(system, i), tenant=f"tenant {i}") for i in range(2))
    add(scheduler, first, second)
    run(scheduler)
    assert second.generation.result().cached_prompt_tokens == 0


# Memory


def test_what_does_not_fit_waits_and_nobody_overtakes_it(target: WatchedTarget) -> None:
    """Memory for two small requests or one large: strictly first come, first served, and all of them finish."""
    small, large = target.kv_bytes(60), target.kv_bytes(600)
    assert large > 2 * small
    scheduler = scheduler_on(target, EngineLimits(max_kv_bytes=large + small // 2))
    requests = [request_for(target, prompt_of(n, i)) for i, n in enumerate((10, 12, 540, 9, 11))]
    add(scheduler, *requests)
    scheduler.round()
    assert requests[2:] == list(scheduler.waiting)
    order, most = [], 0
    while not scheduler.idle:
        scheduler.round()
        most = max(most, scheduler.admission.reserved_bytes + scheduler.admission.idle_bytes)
        order += [i for i, r in enumerate(requests) if r.generation.done and i not in order]
    assert order[2] == 2
    assert most <= scheduler.admission.max_kv_bytes
    assert all(len(r.generation.result().token_ids) == 8 for r in requests)
    assert nothing_is_held(scheduler)


def test_memory_that_runs_out_is_said_clearly_and_idle_conversations_are_given_up(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target)
    add(scheduler, request_for(target, prompt_of(6)))
    run(scheduler)
    assert scheduler.admission.idle_bytes > 0
    torch_on_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 1 GB")
    target.guilty = lambda slot: torch_on_cpu
    broken = request_for(target, prompt_of(30, 1))
    add(scheduler, broken)
    run(scheduler)
    error = error_of(broken)
    assert isinstance(error, OutOfMemory)
    assert "memory ran out while prefilling a prompt of 30 tokens" in str(error)
    assert "max_kv_bytes" in str(error)
    assert torch_on_cpu.__traceback__ is None
    assert scheduler.admission.idle_bytes == 0
    assert nothing_is_held(scheduler)


# Leaving


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.sampled(2)
def test_a_cancelled_request_leaves_wherever_it_is(target: WatchedTarget, rounds: int) -> None:
    """Waiting, in the middle of its prompt or running: the next round lets it go, and the others get their answers."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40, max_running=2))
    others = [request_for(target, prompt_of(6, i), max_tokens=20) for i in range(3)]
    unwanted = request_for(target, prompt_of(130, 7), max_tokens=50)
    add(scheduler, others[0], unwanted, *others[1:])
    for _ in range(rounds):
        scheduler.round()
    unwanted.generation.cancel()
    scheduler.round()
    assert isinstance(error_of(unwanted), RequestCancelled)
    run(scheduler)
    assert [r.generation.result().token_ids for r in others] == [answer_alone(prompt_of(6, i), 20) for i in range(3)]
    assert nothing_is_held(scheduler)
    assert scheduler.metrics(0).num_requests_cancelled == 1


def test_an_error_in_one_prefill_fails_that_request_alone(target: WatchedTarget) -> None:
    """Also in the middle of a prompt; what the slot holds is not trusted any more."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40))
    fine, broken = request_for(target, prompt_of(5), max_tokens=30), request_for(target, prompt_of(200, 1))
    add(scheduler, fine)
    scheduler.round()
    add(scheduler, broken)
    target.guilty = lambda slot: ValueError("no such layer") if slot.token_ids[:1] == [1] else None
    run(scheduler)
    assert "ValueError while prefilling a prompt of 200 tokens: no such layer" in str(error_of(broken))
    assert fine.generation.result().token_ids == answer_alone(prompt_of(5), 30)
    assert nothing_is_held(scheduler)


@pytest.mark.parametrize("error", [ValueError("boom"), torch.OutOfMemoryError("CUDA out of memory")])
def test_only_the_guilty_one_fails_in_a_shared_step(
    target: WatchedTarget, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward of all fails as a whole; repeated one by one, once, it tells who it was, and nothing of its time."""
    scheduler = scheduler_on(target)
    requests = [request_for(target, prompt_of(6, i), max_tokens=12) for i in range(4)]
    add(scheduler, *requests)
    until_all_run(scheduler, 4)
    target.guilty = lambda slot: error if slot.token_ids[0] == 2 else None
    target.batches.clear()
    times: list[float] = []
    monkeypatch.setattr(Planner, "observe_forward", lambda planner, *measured: times.append(measured[1]))
    scheduler.round()
    assert target.batches == [4, 1, 1, 1, 1]
    assert times == []
    run(scheduler)
    assert isinstance(error_of(requests[2]), GenerationError)
    for number in (0, 1, 3):
        assert requests[number].generation.result().token_ids == answer_alone(prompt_of(6, number), 12)
    assert nothing_is_held(scheduler)
    assert scheduler.metrics(0).num_requests_failed == 1


FAILING: dict[str, tuple[type, str]] = {
    "starting the request": (QueuedSequence, "begin"),
    "verifying": (DecodeLoop, "rows"),
    "accounting for a verdict": (QueuedSequence, "append"),
    "turning tokens into text": (QueuedSequence, "deliver"),
}


@pytest.mark.parametrize("stage", FAILING)
def test_a_request_that_fails_at_any_stage_fails_alone(
    target: WatchedTarget, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_on(target)
    fine, broken = (request_for(target, prompt_of(6, number), max_tokens=12) for number in range(2))
    kind, name = FAILING[stage]
    really = getattr(kind, name)

    def failing(one: object, *given: object) -> object:
        if broken in (one, getattr(next(iter(given), None), "sequence", None)):
            raise ValueError("boom")
        return really(one, *given)

    monkeypatch.setattr(kind, name, failing)
    add(scheduler, fine, broken)
    run(scheduler)
    assert f"ValueError while {stage}" in str(error_of(broken))
    assert fine.generation.result().token_ids == answer_alone(prompt_of(6), 12)
    assert nothing_is_held(scheduler)


@pytest.mark.parametrize("drafting", ["nothing", "a draft model", "an early exit"])
def test_what_a_request_held_goes_with_it(target: WatchedTarget, drafting: str) -> None:
    """Keys and values are large: they cannot wait for the garbage collector."""
    scheduler = scheduler_on(target)
    drafter = {
        "nothing": NullDrafter,
        "a draft model": lambda: DraftModelDrafter(WatchedTarget(seed=42)),
        "an early exit": lambda: DraftModelDrafter(TargetModel(first_layers(target.model, 1)), early_exit=True),
    }[drafting]()
    request = request_for(target, prompt_of(6), drafter, max_tokens=50)
    add(scheduler, request)
    while request.stats.num_steps < 3:
        scheduler.round()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(request.slot.kv)
        scheduler.fail_all(GenerationError("the engine is closed"))
        assert gone() is None
    finally:
        gc.enable()


# What is measured


def test_a_request_knows_how_long_its_caller_waited(target: WatchedTarget) -> None:
    """Every token but the first emission's counts once; gaps add up to the time between first and last emission."""
    scheduler, request = scheduler_on(target), request_for(target, prompt_of(6), max_tokens=20)
    add(scheduler, request)
    run(scheduler)
    result, stats, emissions = request.generation.result(), request.stats, list(request.generation)
    assert len(stats.inter_token.gaps) == len(emissions) - 1
    assert sum(stats.inter_token.num_tokens) == len(result.token_ids) - len(emissions[0].token_ids)
    assert 0 < stats.queue_seconds < stats.first_token_seconds < stats.total_seconds
    assert stats.first_token_seconds + sum(stats.inter_token.gaps) <= stats.total_seconds
    latency = stats.as_dict()["latency_microseconds"]
    assert all(type(value) is int for value in latency.values())
    assert 0 < latency["inter_token_latency_p50"] <= latency["inter_token_latency_p95"] <= latency["longest_gap"]
    assert latency["time_to_first_token"] < latency["e2e_request_latency"]


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_who_waits_for_a_beginning_goes_on_when_it_is_given_up(target: WatchedTarget, how: str) -> None:
    scheduler, system = scheduler_on(target), prompt_of(600)
    first, second = (request_for(target, with_tail(system, i)) for i in range(2))
    add(scheduler, first, second)
    scheduler.round()
    assert 0 < first.num_prefilled < 600
    assert not second.started
    if how == "cancelled":
        first.generation.cancel()
    else:
        broken = first.slot
        target.guilty = lambda slot: ValueError("boom") if slot is broken else None
    run(scheduler)
    error_of(first)
    result = second.generation.result()
    assert result.token_ids == answer_alone(second.prompt_ids)
    assert result.cached_prompt_tokens == (first.num_prefilled if how == "cancelled" else 0)


def test_a_step_whose_loop_fails_ends_its_requests_and_not_the_scheduler(target: WatchedTarget) -> None:
    scheduler, (first, second) = scheduler_on(target), (request_for(target, prompt_of(6)) for _ in range(2))
    add(scheduler, first)
    target.commit_all = None  # type: ignore[assignment, method-assign]
    run(scheduler)
    assert "TypeError while stepping" in str(error_of(first))
    del target.commit_all
    add(scheduler, second)
    run(scheduler)
    assert second.generation.result().token_ids == answer_alone(prompt_of(6))


def test_tokens_that_do_not_exist_are_never_scored(target: WatchedTarget) -> None:
    """A damaged memory may propose any number; an embedding that is not there would fail the whole step."""
    scheduler, answer = scheduler_on(target), answer_alone(prompt_of(6))
    mad = request_for(target, prompt_of(6), OracleDrafter([answer[0], 10**6, *answer[2:]]))
    negative = request_for(target, prompt_of(6), OracleDrafter([-5, *answer]))
    add(scheduler, mad, negative)
    run(scheduler)
    for request in (mad, negative):
        assert request.generation.result().token_ids == answer
        assert request.stats.num_steps >= 2
    assert sum(target.batches) == mad.stats.num_steps + negative.stats.num_steps, "a forward had to be repeated"
