"""The whole tree weighed at once: the numbers of the reference, and nothing read back before the walk asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precedent.sampling import CounterCoins
from precedent.testing.enumeration import ToyRows, enumerate_outcomes
from precedent.testing.random_trees import random_problem
from precedent.tree import ROOT, CandidateTree, Drawn, TreeBuilder
from precedent.verify import prepare, verify
from precedent.verify.batched import BatchedWeights
from precedent.verify.walk import walk

READS_BACK = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


class Recording(TorchDispatchMode):
    """Notes which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def large_tree(vocab_size: int, *, device: str = "cpu", num_points: int = 58) -> tuple[CandidateTree, torch.Tensor]:
    """A chain of six draws beside `num_points` cached tokens in four branches, and random target rows, float32."""
    generator = torch.Generator().manual_seed(0)
    builder, node = TreeBuilder(), ROOT
    branches = [ROOT] * 4
    for number in range(num_points):
        branches[number % 4] = builder.add_point(branches[number % 4], number % 4, "cache")
    for _ in range(6):
        row = torch.rand(vocab_size, generator=generator).softmax(0).to(device)
        law = Drawn(row, builder.children(node))
        node = builder.add_draw(node, 10, law, "draft")
    tree = builder.build()
    rows = torch.rand(len(tree) + 1, vocab_size, generator=generator).mul(3).softmax(1).to(device)
    return tree, rows


@pytest.mark.parametrize("lazy", [False, True])
def test_weighing_reads_nothing_back_from_the_device(lazy: bool) -> None:
    """On a GPU each such operation would wait for everything before it."""
    tree, rows = large_tree(100)
    with Recording() as recording:
        weights = BatchedWeights(tree, rows, lazy=lazy)
    assert not set(recording.names) & set(READS_BACK)
    with Recording() as counting:
        walk(weights, CounterCoins(0, 0))
    assert counting.names.count("searchsorted") == 1, "a step draws one token, however deep the cached path"


def test_a_deep_tree_of_points_is_weighed_in_as_many_rounds_as_it_is_wide() -> None:
    """Launches, not arithmetic, are what a small tree costs on a GPU."""
    tree, rows = large_tree(100)
    with Recording() as recording:
        BatchedWeights(tree, rows, lazy=True)
    assert recording.names.count("scatter") == 5, "four points beside the draw, and one round for all below them"


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_the_same_coins_give_the_same_verdict_on_trees_without_points(mode: str) -> None:
    """Draw by draw the numbers are those of the reference; with points the coins differ, the law does not."""
    compared = 0
    for seed in range(300):
        problem = random_problem(seed, max_trees=27)
        if problem.points:
            continue
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            rows = ToyRows(problem.target, tree)
            one, other = (verify(tree, rows, mode, CounterCoins(seed, number), batched=b) for b in (False, True))
            assert one == other
            compared += 1
    assert compared > 100


def test_rows_that_come_as_one_matrix_are_taken_at_once() -> None:
    """No row is asked for alone, which would cost a launch and a check each."""
    tree, matrix = large_tree(100)

    class Matrix:
        def matrix(self) -> torch.Tensor:
            return matrix

    verdict = prepare(tree, Matrix(), "traversal", batched=True)(CounterCoins(1, 1))  # type: ignore[arg-type]
    assert 0 <= verdict.next_token < 100


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
def test_on_cuda_the_device_is_waited_for_only_when_the_walk_reads(lazy: bool) -> None:
    """CUDA itself raises an error at any earlier wait; the numbers equal those of the CPU."""
    tree, rows = large_tree(50_000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights = BatchedWeights(tree, rows, lazy=lazy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = BatchedWeights(*large_tree(50_000), lazy=lazy)
    for node in range(ROOT, len(tree)):
        assert weights.accept(node) == pytest.approx(reference.accept(node), rel=1e-4)
        assert torch.allclose(weights.leftover(node).cpu(), reference.leftover(node), rtol=1e-3, atol=1e-7)
