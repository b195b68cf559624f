"""What several sequences commit is moved together, in as few operations as one would take, and never halfway."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.operations import Operations
from torch import Tensor

from precedent.target import Slot, TargetModel
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_cuda import StaticSettings
from precedent_cuda.arena import BlockArena
from precedent_testing.tiny_models import tiny_causal_lm

IN_AN_ARENA = StaticSettings(arena_tokens=2048, capture=False)


def two_branches() -> CandidateTree:
    """Its second branch, nodes 1 and 3, does not stand in place."""
    builder = TreeBuilder()
    first, second = builder.add_fixed(ROOT, 3, "test"), builder.add_fixed(ROOT, 4, "test")
    builder.add_fixed(first, 5, "test")
    builder.add_fixed(second, 6, "test")
    return builder.build()


def scored(target: TargetModel, count: int) -> list[Slot]:
    slots = [target.new_slot() for _ in range(count)]
    for number, slot in enumerate(slots):
        target.prefill(slot, [7 + number] * (5 + number))
    target.score([(slot, two_branches()) for slot in slots])
    return slots


def rows(slot: Slot) -> Tensor:
    """Everything committed, [layers, 2, heads, length, head_dim]."""
    return torch.stack([torch.cat(layer.rows(0, slot.kv.length)) for layer in slot.kv.layers])


def commit_second_branch(target: TargetModel, slots: Sequence[Slot]) -> int:
    """Returns how many operations copied rows."""
    with Operations() as operations:
        assert target.commit_all([(slot, two_branches(), (1, 3), 9) for slot in slots]) == [None] * len(slots)
    return sum(name in ("index_select", "index_copy_", "copy_") for name in operations.names)


@pytest.mark.parametrize("static", [IN_AN_ARENA, None], ids=["arena", "buffers of their own"])
def test_what_is_committed_together_is_what_each_would_commit_alone(static: StaticSettings | None) -> None:
    target = TargetModel(tiny_causal_lm(), cuda_graphs=static)
    together, alone = scored(target, 3), scored(target, 3)
    commit_second_branch(target, together)
    for one, other in zip(together, alone, strict=True):
        target.commit(other, two_branches(), (1, 3), 9)
        assert torch.equal(rows(one), rows(other))
        assert one.token_ids[-2:] == [4, 6]
        assert one.pending == 9
    assert not torch.equal(rows(together[0])[..., -1, :], rows(together[1])[..., -1, :])


def test_in_an_arena_many_sequences_take_as_many_copies_as_one() -> None:
    target = TargetModel(tiny_causal_lm(), cuda_graphs=IN_AN_ARENA)
    assert commit_second_branch(target, scored(target, 8)) == commit_second_branch(target, scored(target, 1)) == 4


def test_a_commit_that_fails_for_one_leaves_those_before_it_whole() -> None:
    """Lengths count rows that stand in place, whatever came after."""
    target = TargetModel(tiny_causal_lm(), cuda_graphs=IN_AN_ARENA)
    (first, second), (expected, _) = scored(target, 2), scored(target, 2)
    target.commit(expected, two_branches(), (1, 3), 9)
    errors = target.commit_all([(first, two_branches(), (1, 3), 9), (second, two_branches(), (1, 9), 9)])
    assert errors[0] is None
    assert isinstance(errors[1], IndexError)
    assert torch.equal(rows(first), rows(expected))
    assert second.kv.length == len(second.token_ids) == 5


def test_moves_that_fail_fail_those_whose_rows_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(tiny_causal_lm(), cuda_graphs=IN_AN_ARENA)
    first, second = scored(target, 2)

    def full(arena: BlockArena, pairs: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(BlockArena, "move", full)
    chain, branch = (first, two_branches(), (0,), 9), (second, two_branches(), (1, 3), 9)
    assert [type(error) for error in target.commit_all([chain, branch])] == [type(None), MemoryError]
