"""What the scheduler measures: costs, waiting, the speed against plain steps, and its metrics."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.scheduling import WatchedTarget, prompt_of, request_for, run, scheduler_on

from precedent.config import EngineLimits
from precedent.decoding.stats import GenerationStats
from precedent_testing.drafters import OracleDrafter


def test_the_cost_curve_learns_one_forward_per_step_over_all_rows(target: WatchedTarget) -> None:
    """Not one observation per sequence: the time is that of the whole width."""
    scheduler, seen = scheduler_on(target), []
    scheduler.loop.aids.planner.cost.observe = lambda width, *_: seen.append(width)  # type: ignore[method-assign]
    requests = [request_for(target, prompt_of(6, i), OracleDrafter([1, 2, 3]), max_tokens=9) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    while len(scheduler.running) < 3:
        scheduler.round()
    seen.clear()
    drafted = sum(r.stats.num_draft_tokens for r in requests)
    scheduler.round()
    assert seen == [3 + sum(r.stats.num_draft_tokens for r in requests) - drafted]


def test_a_request_knows_how_long_its_caller_waited(target: WatchedTarget) -> None:
    """Every token but the first emission's counts once; gaps add up to the time between first and last emission."""
    scheduler, request = scheduler_on(target), request_for(target, prompt_of(6), max_tokens=20)
    scheduler.add(request)
    run(scheduler)
    result, stats = request.generation.result(), request.stats
    emissions = list(request.generation)
    assert len(stats.inter_token.gaps) == len(emissions) - 1
    assert sum(stats.inter_token.num_tokens) == len(result.token_ids) - len(emissions[0].token_ids)
    assert 0 < stats.queue_seconds < stats.first_token_seconds < stats.total_seconds
    assert stats.first_token_seconds + sum(stats.inter_token.gaps) <= stats.total_seconds
    latency = stats.as_dict()["latency_microseconds"]
    assert all(type(value) is int for value in latency.values())
    assert 0 < latency["inter_token_latency_p50"] <= latency["inter_token_latency_p95"] <= latency["longest_gap"]
    assert latency["time_to_first_token"] < latency["e2e_request_latency"]


def test_the_speed_is_estimated_against_plain_steps_of_the_same_requests(target: WatchedTarget) -> None:
    """Alone a plain step is one row; beside two others it is three, and every token would have taken one."""
    for together in (1, 3):
        scheduler = scheduler_on(target)
        cost = scheduler.loop.aids.planner.cost
        cost.table, cost.observe = np.arange(1.0, cost.table.size + 1), lambda *_: None  # type: ignore[method-assign]
        requests = [
            request_for(target, prompt_of(6, i), OracleDrafter([1, 2, 3]), max_tokens=9) for i in range(together)
        ]
        for request in requests:
            scheduler.add(request)
        while len(scheduler.running) < together:
            scheduler.round()
        before = [(request.stats.plain_seconds, request.stats.num_output_tokens) for request in requests]
        scheduler.round()
        for request, (seconds, tokens) in zip(requests, before, strict=True):
            gained = request.stats.num_output_tokens - tokens
            assert gained > 0
            assert request.stats.plain_seconds - seconds == pytest.approx(gained * together / 1e3)


def test_the_estimate_is_the_time_of_plain_steps_by_the_time_that_it_took() -> None:
    stats = GenerationStats(decode_seconds=2.0, plain_seconds=5.0)
    assert stats.estimated_speedup == 2.5
    assert stats.as_dict()["estimated_speedup"] == 2.5
    assert GenerationStats(plain_seconds=5.0).as_dict()["estimated_speedup"] is None
    assert GenerationStats(decode_seconds=2.0).as_dict()["estimated_speedup"] is None


def test_the_metrics_add_up(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target, EngineLimits(max_running=2))
    requests = [request_for(target, prompt_of(9, i), max_tokens=5) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.round()
    now = scheduler.metrics(4)
    assert (now.num_requests_running, now.num_requests_waiting) == (2, 5)
    assert now.kv_cache_reserved_bytes == 2 * requests[0].kv_bytes
    assert now.e2e_request_latency_seconds.p95 == 0
    assert now.generation_tokens == sum(request.stats.num_output_tokens for request in requests) > 0
    assert (now.num_steps, now.num_request_steps, now.decode_seconds_saved) == (1, 2, 0)
    run(scheduler)
    scheduler.add(again := request_for(target, prompt_of(9), max_tokens=5))
    run(scheduler)
    after = scheduler.metrics(0)
    assert after.num_requests_finished == 4
    assert (after.prompt_tokens, after.cached_prompt_tokens) == (36, again.cached_prompt_tokens)
    assert (after.generation_tokens, after.num_steps) == (20, len(target.batches))
    assert after.num_request_steps == sum(r.stats.num_steps for r in (*requests, again))
    assert after.num_accepted_tokens == sum(r.stats.num_accepted_tokens for r in (*requests, again))
    assert 0 < after.time_to_first_token_seconds.p50 <= after.e2e_request_latency_seconds.p95
    assert 0 < after.inter_token_latency_seconds.p50 <= after.inter_token_latency_seconds.p95
