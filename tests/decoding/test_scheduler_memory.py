"""Who waits for memory, who makes room for it, and what is refused because it never fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.scheduling import WatchedTarget, error_of, nothing_is_held, prompt_of, request_for, run, scheduler_on

from precedent.config import EngineLimits, SpeculationConfig
from precedent.engine.admission import Admission
from precedent.errors import CapacityError, ConfigError
from precedent.runtime.failures import OutOfMemory
from precedent_testing.drafters import RandomDrafter


def test_what_does_not_fit_waits_and_nobody_overtakes_it(target: WatchedTarget) -> None:
    """Memory for two small requests or one large: strictly first come, first served, and all of them finish."""
    small, large = target.kv_bytes(60), target.kv_bytes(600)
    assert large > 2 * small
    scheduler = scheduler_on(target, EngineLimits(max_kv_bytes=large + small // 2))
    requests = [request_for(target, prompt_of(n, i)) for i, n in enumerate((10, 12, 540, 9, 11))]
    for request in requests:
        scheduler.add(request)
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


def test_limits_out_of_their_range_are_refused_by_name() -> None:
    for name, value in (("max_running", 0), ("max_kv_bytes", 0), ("max_idle_kv_bytes", -1)):
        with pytest.raises(ConfigError, match=f"{name}={value} must be a whole number, at least"):
            EngineLimits.from_dict({name: value})
    with pytest.raises(ConfigError, match="no setting 'prefill_tokens_per_rounds'; known: "):
        EngineLimits.from_dict({"prefill_tokens_per_rounds": 5})


def test_no_more_than_max_running_are_inside(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target, EngineLimits(max_running=3))
    for number in range(7):
        scheduler.add(request_for(target, prompt_of(6, number)))
    while not scheduler.idle:
        scheduler.round()
        assert scheduler.metrics(0).num_requests_running <= 3
    assert max(target.batches) == 3


def test_idle_conversations_give_way_to_requests(target: WatchedTarget) -> None:
    """Their memory is used while nobody needs it; the oldest go first."""
    small, large = target.kv_bytes(60), target.kv_bytes(600)
    scheduler = scheduler_on(target, EngineLimits(max_kv_bytes=large + small))
    for number in range(3):
        scheduler.add(request_for(target, prompt_of(8, number)))
        run(scheduler)
    assert scheduler.admission.idle_bytes == 3 * small
    scheduler.add(request_for(target, prompt_of(540, 9)))
    scheduler.round()
    assert scheduler.admission.idle_bytes == small
    run(scheduler)
    latest = request_for(target, prompt_of(8, 2))
    scheduler.add(latest)
    run(scheduler)
    assert latest.generation.result().cached_prompt_tokens == 7


def test_what_can_never_fit_is_refused_with_the_numbers(target: WatchedTarget) -> None:
    admission = Admission(target, EngineLimits(max_kv_bytes=2 * 2**20))
    admission.check(2 * 2**20, 10, 10)
    with pytest.raises(CapacityError, match=r"3\.0 MiB.*900 prompt tokens, max_tokens=70.*2\.0 MiB.*max_kv_bytes"):
        admission.check(3 * 2**20, 900, 70)


def test_the_default_budget_is_a_share_of_the_free_memory(target: WatchedTarget) -> None:
    assert Admission(target, EngineLimits(), free=lambda device: 1000).max_kv_bytes == 500
    assert Admission(target, EngineLimits(max_kv_bytes=7), free=lambda device: 1000).max_kv_bytes == 7


def test_memory_that_runs_out_is_said_clearly_and_idle_conversations_are_given_up(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target)
    scheduler.add(request_for(target, prompt_of(6)))
    run(scheduler)
    assert scheduler.admission.idle_bytes > 0
    torch_on_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 1 GB")
    target.guilty = lambda slot: torch_on_cpu
    broken = request_for(target, prompt_of(30, 1))
    scheduler.add(broken)
    run(scheduler)
    error = error_of(broken)
    assert isinstance(error, OutOfMemory)
    assert "memory ran out while prefilling a prompt of 30 tokens" in str(error)
    assert "max_kv_bytes" in str(error)
    assert torch_on_cpu.__traceback__ is None
    assert scheduler.admission.idle_bytes == 0
    assert nothing_is_held(scheduler)


def test_a_proposal_is_a_tree_within_the_memory_that_was_set_aside(target: WatchedTarget) -> None:
    """The widest tree on the last token of the context: the buffers stay within the reservation."""
    wide = SpeculationConfig(max_nodes=200, drafters=())
    request = replace(request_for(target, prompt_of(60), RandomDrafter(259), max_tokens=170, speculation=wide))
    request.kv_bytes = target.kv_bytes(60 + 170 + 200 + 6 + 1)
    scheduler = scheduler_on(target)
    scheduler.add(request)
    run(scheduler)
    assert scheduler.admission.idle_bytes <= request.kv_bytes
