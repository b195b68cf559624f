"""The scheduler, driven by hand: who joins, whose prompt is computed, and who computes a beginning for others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
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
from precedent.target.contract import PREFILL_CHUNK
from precedent_testing.drafters import RandomDrafter


def test_requests_of_every_length_get_the_answers_they_get_alone(target: WatchedTarget) -> None:
    """Joining and leaving between steps changes no text."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=32, max_running=5))
    lengths = [1, 2, 33, 300, 7, 64, 5, 1, 120]
    requests = [request_for(target, prompt_of(n, i), max_tokens=4 + i) for i, n in enumerate(lengths)]
    for number, request in enumerate(requests):
        scheduler.add(request)
        if number % 3 == 2:
            scheduler.round()
    run(scheduler)
    for number, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        assert request.generation.result().token_ids == answer_alone(prompt_of(length, number), 4 + number)
    assert nothing_is_held(scheduler)
    assert max(target.batches) > 1


def test_a_long_prompt_is_computed_in_pieces_between_the_steps_of_others(target: WatchedTarget) -> None:
    """While somebody runs, no round computes more than its share, and every round brings the runner a token."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40))
    runner = request_for(target, prompt_of(5), RandomDrafter(259), max_tokens=200)
    scheduler.add(runner)
    scheduler.round()
    target.pieces.clear()
    newcomer = request_for(target, prompt_of(400, 1))
    scheduler.add(newcomer)
    emitted = []
    while newcomer not in scheduler.running:
        before = runner.stats.num_steps
        scheduler.round()
        emitted.append(runner.stats.num_steps - before)
    assert target.pieces == [40] * 9 + [39]
    assert emitted == [1] * 10


def test_with_nobody_running_a_prompt_is_computed_in_whole_chunks(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40))
    scheduler.add(request_for(target, prompt_of(PREFILL_CHUNK + 101)))
    scheduler.round()
    scheduler.round()
    assert target.pieces == [PREFILL_CHUNK, 100]


def test_prompts_take_turns(target: WatchedTarget) -> None:
    """A short prompt behind a long one does not wait for all of it, and the long one goes on in between."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=64))
    scheduler.add(request_for(target, prompt_of(5), max_tokens=300))
    scheduler.round()
    long, short = request_for(target, prompt_of(900, 1)), request_for(target, prompt_of(100, 2))
    scheduler.add(long)
    scheduler.add(short)
    while short not in scheduler.running:
        scheduler.round()
    assert long in scheduler.prefilling
    assert 64 <= long.num_prefilled <= 192


def with_tail(system: Sequence[int], number: int) -> list[int]:
    return [*system, 200 + number, *range(10, 10 + 3 * number)]


@pytest.mark.parametrize("running", [False, True], ids=["nobody runs", "beside a runner"])
def test_a_common_beginning_is_computed_once(target: WatchedTarget, running: bool) -> None:
    """The branches of a graph under one system prompt: the others wait for it, then go on from a copy."""
    scheduler, system = scheduler_on(target, EngineLimits(prefill_tokens_per_round=64)), prompt_of(300)
    if running:
        scheduler.add(request_for(target, prompt_of(5, 90), max_tokens=200))
        scheduler.round()
    target.pieces.clear()
    requests = [request_for(target, with_tail(system, i)) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    run(scheduler)
    assert sum(target.pieces) == sum(len(r.prompt_ids) - 1 for r in requests) - 4 * 300
    assert [r.generation.result().cached_prompt_tokens for r in requests] == [0, 300, 300, 300, 300]
    assert all(r.generation.result().token_ids == answer_alone(r.prompt_ids) for r in requests)
    assert nothing_is_held(scheduler)


def test_a_common_beginning_is_not_shared_across_tenants(target: WatchedTarget) -> None:
    """How fast a prompt is computed would tell whether somebody else sent it."""
    scheduler, system = scheduler_on(target), prompt_of(300)
    first, second = (request_for(target, with_tail(system, i), tenant=f"tenant {i}") for i in range(2))
    for request in (first, second):
        scheduler.add(request)
    run(scheduler)
    assert second.generation.result().cached_prompt_tokens == 0


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_who_waits_for_a_beginning_goes_on_when_it_is_given_up(target: WatchedTarget, how: str) -> None:
    scheduler, system = scheduler_on(target), prompt_of(600)
    first, second = (request_for(target, with_tail(system, i)) for i in range(2))
    for request in (first, second):
        scheduler.add(request)
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
