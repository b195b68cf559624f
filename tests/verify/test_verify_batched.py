"""The whole tree weighed at once: the numbers of the reference, and nothing read back before the walk asks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.operations import Operations
from helpers.random_trees import random_problem
from precedent.verify.batched import BatchedWeights
from precedent.verify.weighing import Weighing

from precedent.config import SamplingParams
from precedent.errors import GenerationError
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.testing.replay_rng import enumerate_outcomes
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import prepare, verify
from precedent.verify.recursion import Weights
from precedent.verify.walk import walk

READS_BACK = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


def large_tree(vocab_size: int, *, device: str = "cpu", num_fixed: int = 58) -> tuple[CandidateTree, torch.Tensor]:
    """A chain of six draws beside `num_fixed` cached tokens in four branches, and random target rows, float32."""
    generator = torch.Generator().manual_seed(0)
    builder, node = TreeBuilder(), ROOT
    branches = [ROOT] * 4
    for number in range(num_fixed):
        branches[number % 4] = builder.add_fixed(branches[number % 4], number % 4, "cache")
    for _ in range(6):
        row = torch.rand(vocab_size, generator=generator).softmax(0).to(device)
        distribution = Sampled(row, builder.children(node))
        node = builder.add_sampled(node, 10, distribution, "draft")
    tree = builder.build()
    rows = torch.rand(len(tree) + 1, vocab_size, generator=generator).mul(3).softmax(1).to(device)
    return tree, rows


@pytest.mark.parametrize("lazy", [False, True])
def test_weighing_reads_nothing_back_from_the_device(lazy: bool) -> None:
    """On a GPU each such operation would wait for everything before it."""
    tree, rows = large_tree(100)
    with Operations() as recording:
        weights = BatchedWeights(tree, rows, lazy=lazy)
    assert not set(recording.names) & set(READS_BACK)
    with Operations() as counting:
        walk(weights, CounterRng(0, 0))
    assert counting.names.count("searchsorted") == 1, "a step draws one token, however deep the cached path"


@pytest.mark.parametrize("lazy", [False, True])
def test_a_deep_tree_is_weighed_in_as_many_stages_as_it_is_wide(lazy: bool) -> None:
    """Launches, not arithmetic, are what a small tree costs on a GPU."""
    tree, rows = large_tree(100)
    with Operations() as recording:
        BatchedWeights(tree, rows, lazy=lazy)
    assert recording.names.count("sum") == 6, "the draw and four points beside it, and once for all shortened laws"
    assert recording.names.count("clamp") == 5 + 5 * lazy, "the deeper draws are tried one level after the other"


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_the_same_coins_give_the_same_verdict_on_trees_without_points(mode: str) -> None:
    """Draw by draw the numbers are those of the reference; with points the coins differ, the law does not."""
    compared = 0
    for seed in range(300):
        problem = random_problem(seed, max_trees=27)
        if problem.fixed:
            continue
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            rows = toy_rows(problem.target, tree)
            one, other = (verify(tree, rows, mode, CounterRng(seed, number), batched=b) for b in (False, True))
            assert one == other
            compared += 1
    assert compared > 100


def test_trees_weighed_together_have_the_weights_that_each_has_alone() -> None:
    """Lazy and eager ones, of every feature and size, each with rows of its own somewhere among those of others."""
    together: dict[int, list[tuple[CandidateTree, torch.Tensor, bool]]] = {}
    for seed in range(60):
        problem = random_problem(seed, max_trees=27)
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            rows = torch.stack([toy_rows(problem.target, tree)(node) for node in range(ROOT, len(tree))])
            together.setdefault(rows.shape[1], []).append((tree, rows, number % 3 > 0))
    for group in together.values():
        first_rows = list(accumulate((len(rows) + 2 for _, rows, _ in group), initial=1))  # others' between
        left = torch.ones(first_rows[-1], group[0][1].shape[1], dtype=torch.float64)
        views = [left[first : first + len(one[1])] for first, one in zip(first_rows, group, strict=False)]
        for view, (_, rows, _) in zip(views, group, strict=True):
            view.copy_(rows)
        weights = [
            BatchedWeights(tree, view, lazy=lazy, ahead=True)
            for (tree, _, lazy), view in zip(group, views, strict=True)
        ]
        weighing = Weighing(weights, left, first_rows[:-1])
        numbers = weighing.unread().tolist()
        assert len(numbers) == weighing.count
        weighing.take(numbers)
        for found, (tree, rows, lazy) in zip(weights, group, strict=True):
            assert_same_weights(found, Weights(tree, lambda node, rows=rows: rows[node + 1], lazy=lazy))
    assert sum(map(len, together.values())) > 400


def assert_same_weights(found: BatchedWeights, expected: Weights) -> None:
    """At every node, after any number of rejections; the reference lets nodes with points alone below wait as well."""
    for node in range(ROOT, len(found.tree)):
        if node != ROOT and found.lazy and not found.defers(node):
            continue
        assert found.trials(node) == expected.trials(node)
        assert found.accept(node) == pytest.approx(expected.accept(node), abs=1e-12)
        if expected.accept(node) > 0.0:
            leftover = expected.leftover(node)
            assert torch.allclose(found.leftover(node), leftover / leftover.sum(), rtol=0, atol=1e-12)
        for ordinal in range(len(found.trials(node))):
            assert found.worth(node, ordinal) == pytest.approx(expected.worth(node, ordinal), abs=1e-12)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7, top_k=40, top_p=0.9), SamplingParams(min_p=0.1)])
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_logits_become_weights_without_waiting_for_the_device(mode: str, params: SamplingParams) -> None:
    """No row is asked for alone, which would cost a launch and a check each; truncation included."""
    tree, _ = large_tree(100)
    rows = TargetRows(torch.randn(len(tree) + 1, 100), tree, replace(params, temperature=0.7), at_once=True)
    with Operations() as recording:
        decide = prepare(tree, rows, mode, batched=True)
    assert not set(recording.names) & set(READS_BACK)
    assert recording.names.count("_softmax") == 1
    assert 0 <= decide(CounterRng(1, 1)).next_token < 100


@pytest.mark.parametrize("batched", [False, True], ids=["reference", "batched"])
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), SamplingParams()], ids=["sampled", "greedy"])
def test_a_row_behind_a_forbidden_token_fails_nobody(mode: str, params: SamplingParams, batched: bool) -> None:
    """A grammar that forbids a proposed token has nothing to offer behind it; only a row on the way may fail."""
    builder = TreeBuilder()
    first = builder.add_fixed(ROOT, 0, "cache")
    forbidden = builder.add_fixed(first, 1, "cache")
    builder.add_sampled(forbidden, 2, Sampled(torch.tensor([0.2, 0.3, 0.5])), "draft")
    tree = builder.build()
    logits = torch.tensor([[5.0, -torch.inf, -torch.inf], [1.0, -torch.inf, 9.0], [-torch.inf] * 3, [torch.nan] * 3])
    for number in range(20):
        verdict = verify(tree, TargetRows(logits, tree, params), mode, CounterRng(number, 0), batched=batched)
        assert verdict.path == (first,)
        assert verdict.next_token in (0, 2)
    logits[1] = -torch.inf
    with pytest.raises(GenerationError, match="every token is masked at output position 1"):
        verify(tree, TargetRows(logits, tree, params), mode, CounterRng(0, 0), batched=batched)


def test_a_law_that_excludes_what_does_not_exist_changes_no_other() -> None:
    for outside in (7, -1):
        builder = TreeBuilder()
        builder.add_sampled(ROOT, 1, Sampled(torch.rand(5).softmax(0), (outside,)), "draft")
        with pytest.raises(IndexError, match="not among the 5"):
            BatchedWeights(builder.build(), torch.rand(2, 5).softmax(1), lazy=True)


@pytest.mark.gpu
def test_on_cuda_every_feature_is_weighed_without_waiting() -> None:
    """Points with draws below, exclusions, and masks of what is kept; several trees."""
    generator, builder = torch.Generator().manual_seed(3), TreeBuilder()
    point = builder.add_fixed(ROOT, 1, "cache")
    for parent in (point, ROOT, ROOT):
        row = torch.rand(50, generator=generator).softmax(0).cuda()
        builder.add_sampled(parent, int(row.argmax()), Sampled(row, (3, 4), row > row.median()), "draft")
    builder.add_sampled(ROOT, int(row.argmin()), Sampled(row, (3, 4), row > row.median()), "draft")  # swallowed
    tree = builder.build()
    probs = torch.rand(2 * (len(tree) + 1), 50, generator=generator).softmax(1)
    left = probs.clone().cuda()
    weights = [BatchedWeights(tree, part, lazy=True, ahead=True) for part in left.split(len(tree) + 1)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        Weighing(weights, left, [0, len(tree) + 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each, rows in zip(weights, probs.split(len(tree) + 1), strict=True):
        reference = Weights(tree, lambda node, rows=rows: rows[node + 1].cuda(), lazy=True)
        for node in range(ROOT, len(tree)):
            for ordinal in range(len(each.trials(node))):
                assert each.worth(node, ordinal) == pytest.approx(reference.worth(node, ordinal), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
def test_on_cuda_the_device_is_waited_for_only_when_the_walk_reads(lazy: bool) -> None:
    """CUDA itself raises an error at any earlier wait; the numbers equal those of the CPU."""
    tree, rows = large_tree(50_000, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        weights = BatchedWeights(tree, rows, lazy=lazy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = BatchedWeights(*large_tree(50_000), lazy=lazy)
    for node in range(ROOT, len(tree)):
        assert weights.accept(node) == pytest.approx(reference.accept(node), rel=1e-4)
        assert torch.allclose(weights.leftover(node).cpu(), reference.leftover(node), rtol=1e-3, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["traversal", "topdown", "greedy"])
def test_on_cuda_logits_become_a_verdict_as_on_a_cpu(mode: str) -> None:
    """Rows are one matrix there by themselves; CUDA itself raises an error at any wait before the walk."""
    tree, _ = large_tree(5_000, device="cuda")
    logits = torch.randn(len(tree) + 1, 5_000, generator=torch.Generator().manual_seed(2)).mul(4).cuda()
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.7, top_p=0.95)
    rows = TargetRows(logits, tree, params)
    try:
        torch.cuda.set_sync_debug_mode("error")
        decide = prepare(tree, rows, mode, batched=mode != "greedy")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = TargetRows(logits.cpu(), tree, params)
    for node in range(ROOT, len(tree)):
        assert torch.allclose(rows(node).cpu(), reference(node), rtol=1e-3, atol=1e-6)
        assert rows.argmax(node) == reference.argmax(node)
    assert 0 <= decide(CounterRng(1, 1)).next_token < 5_000
