"""On a GPU a step reads once: the verdicts of the same random numbers as row by row, and nothing else waits."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.known_weights import WAYS, verifier_of
from helpers.prefilled import (
    PROMPT,
    VOCABULARY,
    Operations,
    as_on_a_gpu,
    fixed_tree,
    grammar_and_penalties,
    noting_probabilities,
    sequences,
    static_target,
    verified,
)
from helpers.random_trees import random_problem
from helpers.staged_weights import StagedWeights, Weighed, all_probs, weighed
from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal
from precedent.decoding.sequence import DecodingSequence
from precedent.errors import GenerationError
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.sampling.constraints import Chain
from precedent.sampling.rng import CounterRng
from precedent.sampling.row_shaper import RowShaper
from precedent.sampling.target_rows import TargetRows
from precedent.target import TargetModel
from precedent.tree import NULL, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Pending, RowWeights, Verdict, verify
from precedent_cuda import ahead
from precedent_cuda.ahead import LAZY, Ahead, computed_alike, read_together, verify_ahead
from precedent_cuda.host_waits import HostWaits
from precedent_testing.replay_rng import enumerate_outcomes

READS_BACK = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
REJECTION_MODES = pytest.mark.parametrize("mode", LAZY)
BOTH_KINDS = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


@pytest.fixture(autouse=True)
def masks_are_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "DURING_A_FORWARD", math.inf)


def constraints() -> RowShaper:
    return grammar_and_penalties(PROMPT)


def mixed_tree(seed: int) -> CandidateTree:
    """Samples with exclusions and fixed candidates, below one another and beside one another."""
    generator, builder = torch.Generator().manual_seed(seed), TreeBuilder()
    fixed = builder.add_fixed(ROOT, int(torch.randint(VOCABULARY, (1,), generator=generator)), "cache")
    builder.add_fixed(fixed, 3, "cache")
    node = ROOT
    for _ in range(3):
        distribution = Sampled(torch.rand(VOCABULARY, generator=generator).softmax(0), builder.children(node))
        token = int(torch.multinomial(distribution.probs(), 1, generator=generator))
        node = builder.add_sampled(node, token, distribution, "draft")
    return builder.build()


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
        node = builder.add_sampled(node, 10, Sampled(row, builder.children(node)), "draft")
    tree = builder.build()
    rows = torch.rand(len(tree) + 1, vocab_size, generator=generator).mul(3).softmax(1).to(device)
    return tree, rows


def target_rows(
    tree: CandidateTree, seed: int, params: SamplingParams = SAMPLED, shape: RowShaper | None = None
) -> TargetRows:
    logits = torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
    return TargetRows(logits, tree, params, (), shape)


def step(target: TargetModel, planner: Planner, running: Sequence[DecodingSequence]) -> None:
    DecodeLoop(target, planner).step([sequence for sequence in running if not sequence.finished])
    assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]


# Verdicts


@REJECTION_MODES
def test_verdicts_read_together_are_those_of_the_same_random_numbers(mode: str) -> None:
    """Many trees, several at once, with samples and of fixed candidates alone; paths of all lengths occur."""
    lengths = set()
    for start in range(0, 120, 3):
        trees = [fixed_tree(start), mixed_tree(start + 1), mixed_tree(start + 2)]
        modes = [mode, *sorted(LAZY)]
        pending = [
            Pending(target_rows(tree, start + place), CounterRng(7, start + place), its)
            for place, (tree, its) in enumerate(zip(trees, modes, strict=True))
        ]
        verify_ahead(pending)
        for place, each in enumerate(pending):
            assert each.ahead is not None
            expected = verify(trees[place], target_rows(trees[place], start + place), each.mode, each.rng)
            assert each.verdict() == expected, "as row by row"
            lengths.add(len(expected.path))
    assert {0, 1, 2} <= lengths


def test_only_rows_that_become_probabilities_in_the_same_way_are_computed_together_and_as_many_as_fit() -> None:
    """Greedy ones have none: they go together, whatever else was asked for."""
    asked = [(SAMPLED, "traversal"), (SamplingParams(temperature=0.5), "topdown"), (SamplingParams(), "greedy")]
    asked += [(SamplingParams(top_k=3), "greedy"), (SAMPLED, "topdown")]
    asked += [(replace(SAMPLED, seed=seed), "coupled") for seed in (1, 2)]
    tree = fixed_tree(0)
    for most, expected in ((ahead.MOST_AT_ONCE, [[0, 4], [1], [2, 3], [5, 6]]), (1, [[i] for i in range(7)])):
        pending = [Pending(target_rows(tree, 0, params), CounterRng(1, 1), mode) for params, mode in asked]
        groups = [[pending.index(each) for each in group] for group in computed_alike(pending, most_at_once=most)]
        assert sorted(groups) == expected
        verify_ahead(pending, most_at_once=most)
        for each, (params, mode) in zip(pending, asked, strict=True):
            assert each.ahead is not None
            assert each.verdict() == verify(tree, target_rows(tree, 0, params), mode, CounterRng(1, 1))


@pytest.mark.parametrize("mode", ["greedy", "traversal", "topdown", "coupled"])
@pytest.mark.parametrize("in_time", [True, False])
def test_verdicts_under_constraints_are_the_same_whether_masks_are_found_in_time(
    mode: str, in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not, rows are computed where the walk goes."""
    monkeypatch.setattr(ahead, "DURING_A_FORWARD", math.inf if in_time else -math.inf)
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.9, seed=3)
    for seed in range(30):
        tree = mixed_tree(seed) if seed % 2 and mode in LAZY else fixed_tree(seed)
        pending = Pending(target_rows(tree, seed, params, constraints()), CounterRng(7, seed), mode)
        verify_ahead([pending])
        assert (pending.ahead is not None) is in_time
        expected = verify(tree, target_rows(tree, seed, params, constraints()), mode, CounterRng(7, seed))
        assert pending.verdict() == expected


def test_a_row_that_cannot_be_sampled_fails_when_the_walk_reaches_it() -> None:
    tree, seeded = mixed_tree(1), replace(SAMPLED, seed=1)
    for params, mode in (
        (SAMPLED, "traversal"),
        (SAMPLED, "topdown"),
        (SamplingParams(), "greedy"),
        (seeded, "coupled"),
    ):
        rows = target_rows(tree, 0, params)
        rows.raw[0, 3] = torch.nan
        verify_ahead([pending := Pending(rows, CounterRng(1, 1), mode)])
        assert pending.ahead is not None
        with pytest.raises(GenerationError, match="NaN"):
            pending.verdict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), SamplingParams()], ids=["sampled", "greedy"])
@REJECTION_MODES
def test_a_row_behind_a_forbidden_token_fails_nobody(mode: str, params: SamplingParams, way: str) -> None:
    """A grammar that forbids a proposed token has nothing to offer behind it; only a row on the way may fail."""
    builder = TreeBuilder()
    first = builder.add_fixed(ROOT, 0, "cache")
    forbidden = builder.add_fixed(first, 1, "cache")
    builder.add_sampled(forbidden, 2, Sampled(torch.tensor([0.2, 0.3, 0.5])), "draft")
    tree = builder.build()
    logits = torch.tensor([[5.0, -torch.inf, -torch.inf], [1.0, -torch.inf, 9.0], [-torch.inf] * 3, [torch.nan] * 3])

    def verdicts(number: int) -> list[Verdict]:
        verify_ahead([pending := Pending(TargetRows(logits, tree, params), CounterRng(number, 0), mode)])
        decide = verifier_of(mode, way)(tree, TargetRows(logits, tree, params))
        return [decide(CounterRng(number, 0)), pending.verdict()]

    for verdict in chain.from_iterable(map(verdicts, range(20))):
        assert verdict.path == (first,)
        assert verdict.next_token in (0, 2)
    logits[1] = -torch.inf
    with pytest.raises(GenerationError, match="every token is masked at output position 1"):
        verdicts(0)


def test_a_constraint_that_fails_somewhere_is_applied_row_by_row() -> None:
    """The failing node may be one that the walk never reaches."""

    def failing(output_ids: Sequence[int], row: Tensor) -> Tensor:
        if output_ids[-1:] == (tree.token_ids[-1],):
            raise GenerationError("too complex")
        return row

    tree = fixed_tree(0)
    verify_ahead([pending := Pending(target_rows(tree, 0, shape=Chain([failing])), CounterRng(1, 1), "traversal")])
    assert pending.ahead is None
    assert pending.verdict() == verify(tree, target_rows(tree, 0), "traversal", CounterRng(1, 1))


# Weights


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


@pytest.mark.parametrize("outside", [7, -1])
def test_a_distribution_that_excludes_what_does_not_exist_changes_no_other(outside: int) -> None:
    builder = TreeBuilder()
    builder.add_sampled(ROOT, 1, Sampled(torch.rand(5).softmax(0), (outside,)), "draft")
    with pytest.raises(IndexError, match="not among the 5"):
        weighed([Weighed(builder.build(), torch.rand(2, 5).softmax(1), lazy=True)])


# Operations: launches, not arithmetic, are what a small tree costs on a GPU


@pytest.mark.parametrize(("tested", "stages"), [(False, 1), (True, 5)], ids=["a chain", "a deep tree"])
@BOTH_KINDS
def test_a_tree_is_weighed_in_as_many_stages_as_it_is_wide_and_nothing_is_read_back(
    lazy: bool, tested: bool, stages: int
) -> None:
    """Fixed branches that need no test cost nothing; lazy tests are computed one level after the other."""
    tree, rows = large_tree(100, tested=tested)
    with Operations() as recording:
        weighed([Weighed(tree, rows, lazy)])
    assert not set(recording.names) & set(READS_BACK)
    assert recording.names.count("sum") == stages + 1, "once more for all exclusions"
    assert recording.names.count("clamp") == stages + lazy * (9 if tested else 5)


@pytest.mark.parametrize("warping", [{"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
@REJECTION_MODES
def test_logits_become_a_verdict_with_one_read(mode: str, warping: dict[str, Any]) -> None:
    """No row is asked for alone, which would cost a launch and a check each; the walk asks the device for nothing."""
    (tree, _), params = large_tree(100), SamplingParams(temperature=0.7, **warping)
    pending = Pending(TargetRows(torch.randn(len(tree) + 1, 100), tree, params), CounterRng(1, 1), mode)
    with Operations() as recording:
        found = Ahead([pending])
    assert not set(recording.names) & set(READS_BACK)
    assert recording.names.count("_softmax") == 1
    read_together([found])
    with Operations() as recording:
        verdict = pending.verdict()
    assert recording.names == []
    assert 0 <= verdict.next_token < 100


@pytest.mark.parametrize(
    ("mode", "tree", "most"),
    [
        ("greedy", fixed_tree(0), 20),
        ("traversal", fixed_tree(0), 20),
        ("traversal", mixed_tree(1), 70),
        ("topdown", mixed_tree(1), 60),
    ],
    ids=["greedy", "fixed", "sampled", "sampled, eager"],
)
def test_as_many_operations_for_many_sequences_as_for_one(mode: str, tree: CandidateTree, most: int) -> None:
    """Twenty of them take a hundredth of a step."""
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.7)

    def operations(number: int) -> int:
        pending = [Pending(target_rows(tree, 0, params), CounterRng(1, 1), mode) for _ in range(number)]
        with Operations() as counting:
            verify_ahead(pending)
        return len(counting.launched)

    assert operations(8) <= operations(1) + 2 <= most


# Steps of a loop


@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
def test_texts_do_not_depend_on_how_numbers_are_read(constrained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy texts are those of row by row, as far as both came: a planner goes by the clock."""
    target, texts = static_target(), []
    for on_a_gpu in (False, True):
        if on_a_gpu:
            as_on_a_gpu(monkeypatch)
        running = sequences(target, SamplingParams(), 3, shape_of=constraints if constrained else lambda: None)
        planner = Planner(CostCurve())
        for _ in range(6):
            step(target, planner, running)
        texts.append([sequence.output_ids for sequence in running])
    assert constrained or sum(sequence.stats.num_draft_tokens for sequence in running) > 0
    for one, other in zip(*texts, strict=True):
        common = min(len(one), len(other))
        assert one[:common] == other[:common]
        assert common >= 6
        assert not constrained or all(token % 2 == place % 2 for place, token in enumerate(one))


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(temperature=0.3, seed=5)],
    ids=["greedy", "sampled", "seeded"],
)
@pytest.mark.parametrize("num_tokens", [None, 200], ids=["", "constrained, a head wider than the tokenizer"])
def test_a_step_of_several_sequences_reads_once(
    sampling: SamplingParams, num_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, verification and commit of three sequences, trees and all; the reading itself is the one wait."""
    as_on_a_gpu(monkeypatch)
    target, planner = static_target(), Planner(CostCurve())
    if num_tokens is not None:  # ids that no tokenizer has get by far the largest logits or the smallest
        with torch.no_grad():
            target.model.get_output_embeddings().weight[num_tokens:] *= 50.0
    running = sequences(target, sampling, 3, num_tokens, constraints if num_tokens else lambda: None)
    for _ in range(4):
        with torch.inference_mode(), HostWaits() as waits:
            step(target, planner, running)
        assert waits.names == ["resolve_neg"], "one list is read"
        assert num_tokens is None or max(max(sequence.output_ids) for sequence in running) < num_tokens
    assert sum(sequence.stats.num_draft_tokens for sequence in running) > 0


def test_sequences_that_cannot_be_verified_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose mode is unknown, and one of those verified together, whose draft is impossible."""
    as_on_a_gpu(monkeypatch)
    sampling, builder = SamplingParams(temperature=0.5), TreeBuilder()
    builder.add_sampled(ROOT, 1, Sampled(torch.tensor([0.5, 0.5])), "draft of another vocabulary")
    running = [
        *sequences(static_target(), sampling, 3),
        *sequences(static_target(), sampling, 1, mode="unknown"),
    ]
    trees = [fixed_tree(0), builder.build(), fixed_tree(0), fixed_tree(0)]
    proposals = [Proposal(sequence, tree=tree) for sequence, tree in zip(running, trees, strict=True)]
    rows = [torch.randn(len(tree) + 1, VOCABULARY) for tree in trees]
    rows[1][:, 1] = -100.0  # its draft's token is surely rejected, so its distribution is needed
    found = verified(proposals, rows)
    assert [each.proposal for each in found] == [proposals[0], proposals[2]]
    assert [sequence.error is None for sequence in running] == [True, False, True, False]
    assert "mode='unknown'" in str(running[3].error)
    assert all(each.verdict.next_token in range(VOCABULARY) for each in found)


def test_masks_have_two_milliseconds_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step, however many trees it has: the later ones are verified row by row (white box: the clock)."""
    monkeypatch.setattr(ahead, "DURING_A_FORWARD", 2e-3)
    clock = count(0, 2e-4)
    monkeypatch.setattr(ahead, "perf_counter", lambda: next(clock))
    trees = [fixed_tree(0)] * 3
    pending = [
        Pending(target_rows(tree, 0, SamplingParams(), constraints()), CounterRng(1, 1), "greedy") for tree in trees
    ]
    verify_ahead(pending)
    assert [each.ahead is not None for each in pending] == [True, False, False], "the first tree's were found in time"
    assert len({each.verdict() for each in pending}) == 1


@pytest.mark.parametrize("mode", ["greedy", "traversal", "coupled"])
def test_what_a_step_computed_goes_with_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of all rows are large, on a GPU most of all: they cannot wait for the garbage collector.

    Distributions go even before they are read: `MOST_AT_ONCE` bounds what several groups take in turn.
    """
    as_on_a_gpu(monkeypatch)
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.8, seed=1)
    running, gone = sequences(static_target(), params, 2, mode=mode), []
    noting_probabilities(monkeypatch, lambda logits, found: gone.append(weakref.ref(found)))
    monkeypatch.setattr(
        ahead, "read_together", lambda found: [read_together(found), *(gone.append(each()) for each in [*gone])]
    )
    gc.collect()
    gc.disable()
    try:
        trees = [mixed_tree(1) if mode == "traversal" else fixed_tree(1) for _ in running]
        proposals = [Proposal(sequence, tree=tree) for sequence, tree in zip(running, trees, strict=True)]
        logits = [torch.randn(len(tree) + 1, VOCABULARY) for tree in trees]
        scored = [weakref.ref(each) for each in logits]
        found = verified(proposals, logits)
        assert len(found) == 2
        del found, logits
        assert [each() for each in scored] == [None, None]
        assert len(gone) == 2 * (mode != "greedy")
        assert gone[1:] == [None] * (mode != "greedy"), "before the numbers were read"
    finally:
        gc.enable()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.3)], ids=["greedy", "sampled"])
def test_on_cuda_a_step_waits_once(
    sampling: SamplingParams, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA raises an error at any wait but the one read, for graphs that are replayed."""

    def reading(found: Sequence[Ahead]) -> None:
        torch.cuda.set_sync_debug_mode("default")
        read_together(found)
        torch.cuda.set_sync_debug_mode("error")

    target, planner = static_target("cuda"), Planner(CostCurve())
    for _ in range(3):  # every size that comes has been captured
        running = sequences(target, sampling, 3)
        for _ in range(6):
            step(target, planner, running)
    running = sequences(target, sampling, 3, shape_of=constraints if constrained else lambda: None)
    monkeypatch.setattr(ahead, "read_together", reading)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            step(target, planner, running)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def without_waiting(act: Callable[[], object]) -> object:
    """What `act` returns; CUDA raises an error if it waits."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        return act()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    read = without_waiting(lambda: weighed([Weighed(tree, part, lazy=True) for part in parts]))
    for each, rows in zip(read(), probs.split(len(tree) + 1), strict=True):  # type: ignore[operator]
        expected = RowWeights(tree, lambda node, rows=rows: rows[node + 1].cuda(), lazy=True)
        for node in range(ROOT, len(tree)):
            for ordinal in range(len(each.tests(node))):
                assert each.acceptance(node, ordinal) == pytest.approx(expected.acceptance(node, ordinal), rel=1e-4)


@pytest.mark.gpu
@BOTH_KINDS
def test_on_cuda_weights_equal_those_of_a_cpu_and_take_no_wait(lazy: bool) -> None:
    """CUDA itself raises an error at any wait before the numbers are read."""
    tree, rows = large_tree(50_000, device="cuda")
    read = without_waiting(lambda: weighed([Weighed(tree, rows, lazy)]))
    (weights,), (expected,) = read(), weighed([Weighed(*large_tree(50_000), lazy)])()  # type: ignore[operator]
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
    pending = Pending(rows := TargetRows(logits, tree, params), CounterRng(1, 1), mode)
    found = without_waiting(lambda: Ahead([pending]))
    read_together([found])  # type: ignore[list-item]
    verdict = without_waiting(pending.verdict)
    expected = TargetRows(logits.cpu(), tree, params)
    for node in range(ROOT, len(tree)):
        assert torch.allclose(rows.probs(node).cpu(), expected.probs(node), rtol=1e-3, atol=1e-6)
        assert rows.argmax(node) == expected.argmax(node)
    assert verdict.path == verify(tree, expected, mode, CounterRng(1, 1)).path  # type: ignore[attr-defined]
