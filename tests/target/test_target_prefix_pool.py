"""The prefix pool: what is reused, what is copied, what is let go, and that nobody can tell from the logits."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.tiny_architectures import settings_of

from precedent.target import Slot, TargetModel, common_prefix
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE
from precedent_testing.tiny_models import tiny_causal_lm

SYSTEM = [random.Random(0).randrange(256) for _ in range(300)]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """Windows and full attention, so that a wrong row would show."""
    return TargetModel(tiny_causal_lm("gemma3_text", **settings_of("gemma3_text")))


def asked(pool: PrefixPool, prompt: list[int], tenant: str = "a") -> tuple[Slot, int]:
    """Acquire and prefill; returns the slot and the number of reused tokens."""
    slot = pool.acquire(tenant, prompt)
    return slot, pool.target.prefill(slot, prompt)


def answered(pool: PrefixPool, prompt: list[int], answer: list[int], tenant: str = "a") -> int:
    """A whole request; returns the number of reused tokens."""
    slot, reused = asked(pool, prompt, tenant)
    for token in answer:
        pool.target.plain_step(slot)
        pool.target.commit(slot, EMPTY_TREE, (), token)
    pool.release(tenant, slot)
    return reused


def assert_as_fresh(target: TargetModel, slot: Slot, prompt: list[int]) -> None:
    """The next logits are those of a prefill from nothing."""
    fresh = target.new_slot()
    target.prefill(fresh, prompt)
    torch.testing.assert_close(target.plain_step(slot), target.plain_step(fresh), rtol=0, atol=1e-9)


def test_the_next_turn_takes_the_slot_over(target: TargetModel) -> None:
    """Only what is new is computed, and nothing is copied."""
    pool = PrefixPool(target)
    assert answered(pool, [*SYSTEM, 1, 2], [3, 4, 5]) == 0
    prompt = [*SYSTEM, 1, 2, 3, 4, 6, 7, 8]
    slot, reused = asked(pool, prompt)
    assert reused == len(SYSTEM) + 4
    assert pool.nbytes == 0
    assert_as_fresh(target, slot, prompt)


def test_a_branch_copies_the_shared_rows_alone_and_into_place(target: TargetModel) -> None:
    """The fork has room for its prompt from the start, holds no more, and its origin stays what it was."""
    pool = PrefixPool(target)
    answered(pool, [*SYSTEM, *range(100)], [1])
    held, prompt = pool.nbytes, [*SYSTEM, *range(200, 100, -1)]
    slot = pool.acquire("a", prompt)
    buffers = [block.keys.data_ptr() for block in slot.kv.blocks]
    assert slot.kv.length == len(SYSTEM)
    assert slot.kv.nbytes == target.kv_bytes(len(prompt))
    assert target.prefill(slot, prompt) == len(SYSTEM)
    assert [block.keys.data_ptr() for block in slot.kv.blocks] == buffers
    assert pool.nbytes == held
    assert_as_fresh(target, slot, prompt)
    origin, reused = asked(pool, [*SYSTEM, *range(100), 1, 7])
    assert reused == len(SYSTEM) + 100
    assert_as_fresh(target, origin, [*SYSTEM, *range(100), 1, 7])


def test_concurrent_requests_share_a_system_prompt(target: TargetModel) -> None:
    """A slot in use lends what it holds, also in the middle of its prefill, and does not notice."""
    pool, prompt = PrefixPool(target), [*SYSTEM, 1, 2, 3]
    first = pool.acquire("a", prompt)
    target.begin_prefill(first, prompt)
    target.continue_prefill(first, prompt, 200)
    second, reused = asked(pool, [*SYSTEM, 4, 5])
    assert reused == 200
    while not target.continue_prefill(first, prompt, 64):
        pass
    assert_as_fresh(target, second, [*SYSTEM, 4, 5])
    assert_as_fresh(target, first, prompt)
    pool.release("a", first)
    assert asked(pool, [*SYSTEM, 4, 5, 6])[1] == len(SYSTEM) + 1


@pytest.mark.parametrize("in_use", [True, False])
def test_nothing_crosses_tenants(target: TargetModel, in_use: bool) -> None:
    """Neither an idle slot nor one in use: timing would tell what others asked."""
    pool = PrefixPool(target)
    slot, _ = asked(pool, [*SYSTEM, 1], tenant="a")
    if not in_use:
        pool.release("a", slot)
    assert asked(pool, [*SYSTEM, 1], tenant="b")[1] == 0


def test_the_least_recently_used_goes_first(target: TargetModel) -> None:
    """Three conversations do not fit: the one that was neither continued nor branched from is forgotten."""
    room = target.kv_bytes(400)
    for again in ([*SYSTEM[:200], 9, 9], [*SYSTEM, 3, 5]):
        pool = PrefixPool(target, max_bytes=2 * room)
        for start in (1, 2):
            answered(pool, [start, *SYSTEM], [3])
        answered(pool, [1, *again], [6])
        pool.shrink(room)
        assert pool.nbytes <= room
        assert [asked(pool, [start, *SYSTEM[:150], 9])[1] > 0 for start in (1, 2)] == [True, False]


def test_a_slot_larger_than_the_pool_costs_nobody_else_theirs(target: TargetModel) -> None:
    """It is let go alone; nor is a slot without tokens kept."""
    pool = PrefixPool(target, max_bytes=target.kv_bytes(256))
    answered(pool, [1, *SYSTEM[:100]], [3])
    answered(pool, [2, *SYSTEM], [3])
    pool.release("a", asked(pool, [5])[0])
    assert asked(pool, [2, *SYSTEM])[1] == 0
    assert asked(pool, [1, *SYSTEM[:100], 3])[1] == 101
    assert pool.nbytes == 0


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 5000])
@pytest.mark.parametrize("form", [list, tuple])
def test_the_common_prefix(length: int, form: type) -> None:
    """Wherever the first difference is, and where there is none."""
    left = [i % 7 for i in range(length)]
    assert common_prefix(left, form(left)) == length
    assert common_prefix([*left, 1, 5], form([*left, 2, 5])) == length
    assert common_prefix([*left, 1], form(left)) == length
