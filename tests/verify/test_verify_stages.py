"""Weights computed in stages: the numbers of the recursion row by row, in few operations, and nothing read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.known_weights import WAYS, StagedWeights, Weighed, all_probs, verifier_of, weighed
from helpers.operations import Operations
from helpers.random_trees import random_problem
from torch import Tensor

from precedent.config import SamplingParams
from precedent.errors import GenerationError
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import NULL, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import RowWeights, verify
from precedent.verify.ahead import Ahead, Scored, read_together
from precedent_testing.replay_rng import enumerate_outcomes

READS_BACK = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
SAMPLED = SamplingParams(temperature=1.0)


def large_tree(vocab_size: int, *, device: str = "cpu", tested: bool = False) -> tuple[CandidateTree, Tensor]:
    """A chain of six samples beside 58 fixed candidates in four branches, and random target rows, float32.

    With `tested` a sample hangs below the first node of each branch, which makes that node a test of its own.
    """
    generator = torch.Generator().manual_seed(0)
    builder, node = TreeBuilder(), ROOT
    branches = [ROOT] * 4
    for number in range(58):
        branches[number % 4] = builder.add_fixed(branches[number % 4], number % 4, "cache")
    for first in range(4) if tested else ():
        builder.add_sampled(first, 20, Sampled(torch.rand(vocab_size, generator=generator).softmax(0)), "draft")
    for _ in range(6):
        row = torch.rand(vocab_size, generator=generator).softmax(0).to(device)
        distribution = Sampled(row, builder.children(node))
        node = builder.add_sampled(node, 10, distribution, "draft")
    tree = builder.build()
    rows = torch.rand(len(tree) + 1, vocab_size, generator=generator).mul(3).softmax(1).to(device)
    return tree, rows


@pytest.mark.parametrize("tested", [False, True], ids=["samples", "samples and fixed candidates"])
@pytest.mark.parametrize("lazy", [False, True])
def test_weighing_reads_nothing_back_from_the_device(lazy: bool, tested: bool) -> None:
    """On a GPU each such operation would wait for everything before it."""
    tree, rows = large_tree(100, tested=tested)
    with Operations() as recording:
        weighed([Weighed(tree, rows, lazy)])
    assert not set(recording.names) & set(READS_BACK)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_a_walk_over_weights_that_were_read_asks_the_device_for_nothing(mode: str) -> None:
    """However deep the accepted path: its token was found with those of all other rows."""
    tree, rows = large_tree(100)
    scored = Scored(tree, TargetRows(rows.log(), tree, SAMPLED), CounterRng(0, 0), mode)
    ahead = Ahead([scored])
    read_together([ahead])
    with Operations() as counting:
        verdict = scored.verdict()
    assert counting.names == []
    assert 0 <= verdict.next_token < 100


@pytest.mark.parametrize("lazy", [False, True])
def test_a_deep_tree_is_weighed_in_as_many_stages_as_it_is_wide(lazy: bool) -> None:
    """Launches, not arithmetic, are what a small tree costs on a GPU."""
    tree, rows = large_tree(100, tested=True)
    with Operations() as recording:
        weighed([Weighed(tree, rows, lazy)])
    assert recording.names.count("sum") == 6, "a sample and four fixed siblings, and once for all exclusions"
    assert recording.names.count("clamp") == 5 + 9 * lazy, "lazy tests are computed one level after the other"


@pytest.mark.parametrize("lazy", [False, True])
def test_a_chain_is_weighed_in_one_stage(lazy: bool) -> None:
    """Fixed branches beside it, however many, need no test and cost nothing."""
    tree, rows = large_tree(100)
    with Operations() as recording:
        weighed([Weighed(tree, rows, lazy)])
    assert recording.names.count("sum") == 2, "one stage, and once for all exclusions"
    assert recording.names.count("clamp") == 1 + 5 * lazy


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_the_same_random_numbers_give_the_same_verdict(mode: str) -> None:
    """Test by test the numbers are those of the recursion row by row, whatever the tree holds."""
    compared, mixed = 0, 0
    for seed in range(300):
        problem = random_problem(seed, max_trees=27)
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            rows = toy_rows(problem.target, tree)
            one, other = (verifier_of(mode, way)(tree, rows)(CounterRng(seed, number)) for way in WAYS)
            assert one == other
            compared, mixed = compared + 1, mixed + bool(problem.fixed)
    assert min(mixed, compared - mixed) > 100


def test_trees_weighed_together_have_the_weights_that_each_has_alone() -> None:
    """Lazy and eager ones, of every feature and size, each with rows of its own somewhere among those of others."""
    together: dict[int, list[Weighed]] = {}
    for seed in range(60):
        problem = random_problem(seed, max_trees=27)
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            probs = all_probs(toy_rows(problem.target, tree))
            together.setdefault(probs.shape[1], []).append(Weighed(tree, probs, number % 3 > 0))
    for group in together.values():
        for found, (tree, probs, lazy, _) in zip(weighed(group, gap=2)(), group, strict=True):
            assert_same_weights(found, RowWeights(tree, lambda node, probs=probs: probs[node + 1], lazy=lazy))
            untouched = [node + 1 for node in range(len(tree)) if not found.tests(node)]
            assert torch.equal(found.left[untouched], probs[untouched])
    assert sum(map(len, together.values())) > 400


def assert_same_weights(found: StagedWeights, expected: RowWeights) -> None:
    """After any number of rejections, at every node that is tested; a walk asks others for their rows alone."""
    assert found.all_tests == expected.all_tests
    tested = {each.child for tests in found.all_tests.values() for each in tests}
    for node in (ROOT, *sorted(tested - {NULL})):
        assert found.tests(node) == expected.tests(node)
        assert found.remaining(node) == pytest.approx(expected.remaining(node), abs=1e-12)
        if expected.remaining(node) > 0.0:
            left = expected.state(node, len(expected.tests(node))).residual.dense()
            assert torch.allclose(found.left[node + 1], left / left.sum(), rtol=0, atol=1e-12)
        for ordinal in range(len(found.tests(node))):
            assert found.acceptance(node, ordinal) == pytest.approx(expected.acceptance(node, ordinal), abs=1e-12)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7, top_k=40, top_p=0.9), SamplingParams(min_p=0.1)])
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_logits_become_weights_without_waiting_for_the_device(mode: str, params: SamplingParams) -> None:
    """No row is asked for alone, which would cost a launch and a check each; truncation included."""
    tree, _ = large_tree(100)
    rows = TargetRows(torch.randn(len(tree) + 1, 100), tree, replace(params, temperature=0.7))
    scored = Scored(tree, rows, CounterRng(1, 1), mode)
    with Operations() as recording:
        ahead = Ahead([scored])
    assert not set(recording.names) & set(READS_BACK)
    assert recording.names.count("_softmax") == 1
    read_together([ahead])
    assert 0 <= scored.verdict().next_token < 100


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("params", [SAMPLED, SamplingParams()], ids=["sampled", "greedy"])
def test_a_row_behind_a_forbidden_token_fails_nobody(mode: str, params: SamplingParams, way: str) -> None:
    """A grammar that forbids a proposed token has nothing to offer behind it; only a row on the way may fail."""
    builder = TreeBuilder()
    first = builder.add_fixed(ROOT, 0, "cache")
    forbidden = builder.add_fixed(first, 1, "cache")
    builder.add_sampled(forbidden, 2, Sampled(torch.tensor([0.2, 0.3, 0.5])), "draft")
    tree = builder.build()
    logits = torch.tensor([[5.0, -torch.inf, -torch.inf], [1.0, -torch.inf, 9.0], [-torch.inf] * 3, [torch.nan] * 3])
    for number in range(20):
        for verify_ in (verifier_of(mode, way), production_ahead(mode)):
            verdict = verify_(tree, TargetRows(logits, tree, params))(CounterRng(number, 0))
            assert verdict.path == (first,)
            assert verdict.next_token in (0, 2)
    logits[1] = -torch.inf
    for verify_ in (verifier_of(mode, way), production_ahead(mode)):
        with pytest.raises(GenerationError, match="every token is masked at output position 1"):
            verify_(tree, TargetRows(logits, tree, params))(CounterRng(0, 0))


def production_ahead(mode: str):
    """`Ahead` with one tree, whose tokens are found beforehand as well."""

    def prepare(tree: CandidateTree, rows: TargetRows):
        def decide(rng: CounterRng):
            scored = Scored(tree, rows, rng, mode)
            read_together([Ahead([scored])])
            return scored.verdict()

        return decide

    return prepare


@pytest.mark.parametrize("outside", [7, -1])
def test_a_distribution_that_excludes_what_does_not_exist_changes_no_other(outside: int) -> None:
    builder = TreeBuilder()
    builder.add_sampled(ROOT, 1, Sampled(torch.rand(5).softmax(0), (outside,)), "draft")
    with pytest.raises(IndexError, match="not among the 5"):
        weighed([Weighed(builder.build(), torch.rand(2, 5).softmax(1), lazy=True)])


# On a GPU


@pytest.mark.gpu
def test_on_cuda_every_feature_is_weighed_without_waiting() -> None:
    """Fixed candidates with samples below, exclusions, and masks of what is kept; several trees."""
    generator, builder = torch.Generator().manual_seed(3), TreeBuilder()
    fixed = builder.add_fixed(ROOT, 1, "cache")
    for parent in (fixed, ROOT, ROOT):
        row = torch.rand(50, generator=generator).softmax(0).cuda()
        builder.add_sampled(parent, int(row.argmax()), Sampled(row, (3, 4), row > row.median()), "draft")
    builder.add_sampled(ROOT, int(row.argmin()), Sampled(row, (3, 4), row > row.median()), "draft")  # dropped
    tree = builder.build()
    probs = torch.rand(2 * (len(tree) + 1), 50, generator=generator).softmax(1)
    parts = probs.cuda().split(len(tree) + 1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        read = weighed([Weighed(tree, part, lazy=True) for part in parts])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each, rows in zip(read(), probs.split(len(tree) + 1), strict=True):
        expected = RowWeights(tree, lambda node, rows=rows: rows[node + 1].cuda(), lazy=True)
        for node in range(ROOT, len(tree)):
            for ordinal in range(len(each.tests(node))):
                assert each.acceptance(node, ordinal) == pytest.approx(expected.acceptance(node, ordinal), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
def test_on_cuda_weights_equal_those_of_a_cpu_and_take_no_wait(lazy: bool) -> None:
    """CUDA itself raises an error at any wait before the numbers are read."""
    tree, rows = large_tree(50_000, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        read = weighed([Weighed(tree, rows, lazy)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (weights,), (expected,) = read(), weighed([Weighed(*large_tree(50_000), lazy)])()
    for node in range(ROOT, len(tree)):
        assert weights.remaining(node) == pytest.approx(expected.remaining(node), rel=1e-4)
        assert torch.allclose(weights.left[node + 1].cpu(), expected.left[node + 1], rtol=1e-3, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["traversal", "topdown", "greedy"])
def test_on_cuda_logits_become_a_verdict_as_on_a_cpu(mode: str) -> None:
    """CUDA itself raises an error at any wait before the one read, and at any wait after it."""
    tree, _ = large_tree(5_000, device="cuda")
    logits = torch.randn(len(tree) + 1, 5_000, generator=torch.Generator().manual_seed(2)).mul(4).cuda()
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.7, top_p=0.95)
    rows = TargetRows(logits, tree, params)
    scored = Scored(tree, rows, CounterRng(1, 1), mode)
    try:
        torch.cuda.set_sync_debug_mode("error")
        ahead = Ahead([scored])
        torch.cuda.set_sync_debug_mode("default")
        read_together([ahead])
        torch.cuda.set_sync_debug_mode("error")
        verdict = scored.verdict()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = TargetRows(logits.cpu(), tree, params)
    for node in range(ROOT, len(tree)):
        assert torch.allclose(rows.probs(node).cpu(), expected.probs(node), rtol=1e-3, atol=1e-6)
        assert rows.argmax(node) == expected.argmax(node)
    assert verdict.accepted == verify(tree, expected, mode, CounterRng(1, 1)).accepted
    assert 0 <= verdict.next_token < 5_000
