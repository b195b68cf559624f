"""Requests that are cancelled or fail, wherever they are: they alone, and nothing of theirs is held."""

from __future__ import annotations

import gc
import weakref

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
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.errors import GenerationError, RequestCancelled
from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers
from precedent_testing.drafters import NullDrafter, OracleDrafter, RandomDrafter


@pytest.mark.parametrize("rounds", range(6))
def test_a_cancelled_request_leaves_wherever_it_is(target: WatchedTarget, rounds: int) -> None:
    """Waiting, in the middle of its prompt or running: the next round lets it go, and the others get their answers."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40, max_running=2))
    others = [request_for(target, prompt_of(6, i), max_tokens=20) for i in range(3)]
    unwanted = request_for(target, prompt_of(130, 7), max_tokens=50)
    for request in (others[0], unwanted, *others[1:]):
        scheduler.add(request)
    for _ in range(rounds):
        scheduler.round()
    unwanted.generation.cancel()
    scheduler.round()
    assert isinstance(error_of(unwanted), RequestCancelled)
    run(scheduler)
    assert [r.generation.result().token_ids for r in others] == [answer_alone(prompt_of(6, i), 20) for i in range(3)]
    assert nothing_is_held(scheduler)
    assert scheduler.metrics(0).num_requests_cancelled == 1


def test_a_request_that_waits_can_be_cancelled(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target, EngineLimits(max_running=1))
    first, second = (request_for(target, prompt_of(6, i), max_tokens=30) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    scheduler.round()
    second.generation.cancel()
    scheduler.round()
    assert isinstance(error_of(second), RequestCancelled)
    assert not first.generation.done


def test_an_error_in_one_prefill_fails_that_request_alone(target: WatchedTarget) -> None:
    """Also in the middle of a prompt; what the slot holds is not trusted any more."""
    scheduler = scheduler_on(target, EngineLimits(prefill_tokens_per_round=40))
    fine = request_for(target, prompt_of(5), max_tokens=30)
    broken = request_for(target, prompt_of(200, 1))
    scheduler.add(fine)
    scheduler.round()
    scheduler.add(broken)
    target.guilty = lambda slot: ValueError("no such layer") if slot.token_ids[:1] == [1] else None
    run(scheduler)
    assert "ValueError while prefilling a prompt of 200 tokens: no such layer" in str(error_of(broken))
    assert fine.generation.result().token_ids == answer_alone(prompt_of(5), 30)
    assert nothing_is_held(scheduler)


@pytest.mark.parametrize("error", [ValueError("boom"), torch.OutOfMemoryError("CUDA out of memory")])
def test_only_the_guilty_one_fails_in_a_shared_step(target: WatchedTarget, error: Exception) -> None:
    """The forward of all fails as a whole; repeated one by one, once, it tells who it was."""
    scheduler = scheduler_on(target)
    requests = [request_for(target, prompt_of(6, i), max_tokens=12) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    while len(scheduler.running) < 4:
        scheduler.round()
    target.guilty = lambda slot: error if slot.token_ids[0] == 2 else None
    target.batches.clear()
    scheduler.round()
    assert target.batches == [4, 1, 1, 1, 1]
    run(scheduler)
    assert isinstance(error_of(requests[2]), GenerationError)
    for number in (0, 1, 3):
        assert requests[number].generation.result().token_ids == answer_alone(prompt_of(6, number), 12)
    assert nothing_is_held(scheduler)
    assert scheduler.metrics(0).num_requests_failed == 1


@pytest.mark.parametrize("drafting", ["nothing", "a draft model", "an early exit"])
def test_what_a_request_held_goes_with_it(target: WatchedTarget, drafting: str) -> None:
    """Keys and values are large: they cannot wait for the garbage collector."""
    scheduler, drafters = (
        scheduler_on(target),
        {
            "nothing": (NullDrafter(),),
            "a draft model": (DraftModelDrafter(WatchedTarget(seed=42)),),
            "an early exit": (DraftModelDrafter(TargetModel(first_layers(target.model, 1)), early_exit=True),),
        }[drafting],
    )
    request = request_for(target, prompt_of(6), *drafters, max_tokens=50)
    scheduler.add(request)
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


class FailingDrafter(RandomDrafter):
    """Works until the named call, which raises."""

    name = "failing"

    def __init__(self, call: str) -> None:
        super().__init__(259)
        self._call = call

    def begin(self, request: object) -> object:
        """A session with one call replaced by an error."""
        if self._call == "begin":
            raise KeyError("begin")
        session = super().begin(request)  # type: ignore[arg-type]

        def fail(*args: object) -> None:
            raise KeyError(self._call)

        setattr(session, self._call, fail)
        return session


@pytest.mark.parametrize("call", ["begin", "match", "committed", "end"])
def test_a_drafter_that_raises_fails_nobody(target: WatchedTarget, call: str) -> None:
    """Its request goes on without it, and the others with theirs."""
    scheduler = scheduler_on(target)
    broken, fine = request_for(target, prompt_of(6, 1), FailingDrafter(call)), request_for(target, prompt_of(6))
    scheduler.add(broken)
    scheduler.add(fine)
    run(scheduler)
    assert broken.generation.result().token_ids == answer_alone(prompt_of(6, 1))
    assert fine.generation.result().token_ids == answer_alone(prompt_of(6))
    assert nothing_is_held(scheduler)
    assert scheduler.metrics(0).faults == {"failing": 1}


def test_tokens_that_do_not_exist_are_never_scored(target: WatchedTarget) -> None:
    """A damaged memory may propose any number; an embedding that is not there would fail the whole step."""
    scheduler, answer = scheduler_on(target), answer_alone(prompt_of(6))
    mad = request_for(target, prompt_of(6), OracleDrafter([answer[0], 10**6, *answer[2:]]))
    negative = request_for(target, prompt_of(6), OracleDrafter([-5, *answer]))
    for request in (mad, negative):
        scheduler.add(request)
    run(scheduler)
    for request in (mad, negative):
        assert request.generation.result().token_ids == answer
        assert request.stats.num_steps >= 2
    assert sum(target.batches) == mad.stats.num_steps + negative.stats.num_steps, "a forward had to be repeated"


def test_a_step_whose_loop_fails_ends_its_requests_and_not_the_scheduler(target: WatchedTarget) -> None:
    scheduler = scheduler_on(target)
    first = request_for(target, prompt_of(6))
    scheduler.add(first)
    target.commit_all = None  # type: ignore[assignment, method-assign]
    run(scheduler)
    assert "TypeError while stepping" in str(error_of(first))
    del target.commit_all
    second = request_for(target, prompt_of(6))
    scheduler.add(second)
    run(scheduler)
    assert second.generation.result().token_ids == answer_alone(prompt_of(6))
