"""On a GPU a step reads once: the same verdicts as without, however many sequences, and nothing else waits."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.even_ids import grammar_and_penalties
from helpers.prefilled import (
    PROMPT,
    VOCABULARY,
    as_on_a_gpu,
    fixed_tree,
    noting_probabilities,
    sequences,
    static_target,
    verified,
)

from precedent.config import SamplingParams
from precedent.decoding import verification
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal
from precedent.decoding.sequence import DecodingSequence
from precedent.grammar import constraint as constraint_module
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.sampling.row_shaper import RowShaper
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify.ahead import Ahead, read_together
from precedent_cuda.host_waits import HostWaits
from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture(autouse=True)
def masks_are_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "DURING_A_FORWARD", math.inf)


def constraints() -> RowShaper:
    return grammar_and_penalties(PROMPT)


def step(target: TargetModel, *running: DecodingSequence) -> None:
    DecodeLoop(target, Planner(CostCurve())).step(running)


def played(
    target: TargetModel, sampling: SamplingParams, shape_of: Callable[[], RowShaper | None] = lambda: None
) -> tuple[list[list[int]], int]:
    """The texts of three sequences that are decoded together, and how many nodes were proposed."""
    running, planner = sequences(target, sampling, 3, shape_of=shape_of), Planner(CostCurve())
    for _ in range(6):
        DecodeLoop(target, planner).step([sequence for sequence in running if not sequence.finished])
        assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
    return [sequence.output_ids for sequence in running], sum(one.stats.num_draft_tokens for one in running)


def proposals_of(running: Sequence[DecodingSequence], trees: Sequence[CandidateTree]) -> list[Proposal]:
    return [Proposal(sequence, tree=tree) for sequence, tree in zip(running, trees, strict=True)]


def some_logits(trees: Sequence[CandidateTree]) -> list[torch.Tensor]:
    return [torch.randn(len(tree) + 1, VOCABULARY) for tree in trees]


# Texts


@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
def test_texts_do_not_depend_on_how_numbers_are_read(constrained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy texts are those of row by row, as far as both came: a planner goes by the clock."""
    target, shape_of = static_target(), constraints if constrained else lambda: None
    by_row, _ = played(target, SamplingParams(), shape_of)
    as_on_a_gpu(monkeypatch)
    together, proposed = played(target, SamplingParams(), shape_of)
    for one, other in zip(by_row, together, strict=True):
        common = min(len(one), len(other))
        assert one[:common] == other[:common]
        assert common >= 6
        assert not constrained or all(token % 2 == place % 2 for place, token in enumerate(one))
    assert proposed > 0 or constrained


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(temperature=0.3, seed=5)],
    ids=["greedy", "sampled", "seeded"],
)
@pytest.mark.parametrize("num_tokens", [None, 200], ids=["", "a head wider than the tokenizer"])
@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
def test_a_step_of_several_sequences_reads_once(
    sampling: SamplingParams, num_tokens: int | None, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, verification and commit of three sequences, trees and all; the reading itself is the one wait."""
    as_on_a_gpu(monkeypatch)
    target, planner = static_target(), Planner(CostCurve())
    if num_tokens is not None:  # ids that no tokenizer has get by far the largest logits or the smallest
        with torch.no_grad():
            target.model.get_output_embeddings().weight[num_tokens:] *= 50.0
    running = sequences(target, sampling, 3, num_tokens, constraints if constrained else lambda: None)
    for _ in range(4):
        with torch.inference_mode(), HostWaits() as waits:
            DecodeLoop(target, planner).step(running)
        assert waits.names == ["resolve_neg"], "one list is read"
        assert all(sequence.error is None for sequence in running)
        assert num_tokens is None or max(max(sequence.output_ids) for sequence in running) < num_tokens
    assert sum(sequence.stats.num_draft_tokens for sequence in running) > 0


# Failures


def test_sequences_that_cannot_be_verified_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose mode is unknown, and one of those verified together, whose draft is impossible."""
    as_on_a_gpu(monkeypatch)
    target, sampling = static_target(), SamplingParams(temperature=0.5)
    running = [*sequences(target, sampling, 1, mode="lossy_judge:name=nobody"), *sequences(target, sampling, 1)]
    step(target, *running)
    assert "no judge is called 'nobody'" in str(running[0].error)
    assert running[1].error is None
    assert running[1].output_ids
    builder = TreeBuilder()
    builder.add_sampled(ROOT, 1, Sampled(torch.tensor([0.5, 0.5])), "draft of another vocabulary")
    running, trees = sequences(static_target(), sampling, 3), [fixed_tree(0), builder.build(), fixed_tree(0)]
    proposals = proposals_of(running, trees)
    found = verified(proposals, some_logits(trees))
    assert [each.proposal for each in found] == [proposals[0], proposals[2]]
    assert [sequence.error is None for sequence in running] == [True, False, True]
    assert all(each.verdict.next_token in range(VOCABULARY) for each in found)


def test_a_forward_that_fails_teaches_the_planner_no_time() -> None:
    """It took however long it took to fail, and computed no row."""

    class Ill(TargetModel):
        def score(self, batch: Sequence) -> list[torch.Tensor]:
            raise RuntimeError("the target is ill")

    target, planner = Ill(tiny_causal_lm(dtype=torch.float64)), Planner(CostCurve())
    before = planner.cost.as_dict()
    for count in (1, 2):
        running = sequences(target, SamplingParams(), count)
        DecodeLoop(target, planner).step(running)
        assert all("the target is ill" in str(sequence.error) for sequence in running)
    assert planner.cost.as_dict() == before


# How rows are computed


def test_masks_have_two_milliseconds_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step, however many trees it has: the later ones are verified row by row (white box: the clock)."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(verification, "DURING_A_FORWARD", 2e-3)
    clock = iter([0.0, *[1e-3] * 9, *[3e-3] * 99])
    monkeypatch.setattr(verification, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(constraint_module, "perf_counter", lambda: next(clock))
    ahead: list[int] = []
    monkeypatch.setattr(verification, "Ahead", lambda group: ahead.append(len(group)) or Ahead(group))
    running, trees = sequences(static_target(), SamplingParams(), 3, shape_of=constraints), [fixed_tree(0)] * 3
    found = verified(proposals_of(running, trees), some_logits(trees))
    assert ahead == [1], "the first tree's masks were found in time"
    assert all(each.verdict.next_token in range(VOCABULARY) for each in found)
    assert len(found) == 3


@pytest.mark.parametrize("bitwise", [True, False])
def test_seeded_rows_are_normalised_one_by_one_where_bits_must_not_depend_on_how_many(
    bitwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cumulative sum over several rows at once may be cut otherwise than one over a row alone."""
    shapes: list[int] = []
    as_on_a_gpu(monkeypatch)
    noting_probabilities(monkeypatch, lambda logits, found: shapes.append(logits.dim()))
    target, seeded = static_target(), SamplingParams(temperature=0.3, seed=3, top_p=0.9)
    (running,) = sequences(target, seeded, 1, mode="coupled", bitwise=bitwise)
    step(target, running)
    assert running.error is None
    assert set(shapes) == {1 if bitwise else 2}


def sampled_tree() -> CandidateTree:
    """A chain of samples beside a fixed candidate."""
    generator, builder, node = torch.Generator().manual_seed(1), TreeBuilder(), ROOT
    builder.add_fixed(ROOT, 3, "cache")
    for token in (4, 5, 6):
        row = torch.rand(VOCABULARY, generator=generator).softmax(0)
        node = builder.add_sampled(node, token, Sampled(row, builder.children(node)), "draft")
    return builder.build()


@pytest.mark.parametrize("mode", ["greedy", "traversal", "coupled"])
def test_what_a_step_computed_goes_with_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of all rows are large, on a GPU most of all: they cannot wait for the garbage collector."""
    as_on_a_gpu(monkeypatch)
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.8, seed=1)
    running, gone = sequences(static_target(), params, 2, mode=mode), []
    noting_probabilities(monkeypatch, lambda logits, found: gone.append(weakref.ref(found)))
    gc.collect()
    gc.disable()
    try:
        trees = [sampled_tree() if mode == "traversal" else fixed_tree(1) for _ in running]
        proposals, logits = proposals_of(running, trees), some_logits(trees)
        gone += [weakref.ref(each) for each in logits]
        found = verified(proposals, logits)
        assert len(found) == 2
        del found, logits
        assert len(gone) == 2 + (mode != "greedy")
        assert [each() for each in gone] == [None] * len(gone)
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

    def reading(pending: Sequence[Ahead]) -> None:
        torch.cuda.set_sync_debug_mode("default")
        read_together(pending)
        torch.cuda.set_sync_debug_mode("error")

    target, planner = static_target("cuda"), Planner(CostCurve())
    for _ in range(3):  # every size that comes has been captured
        played(target, sampling)
    running = sequences(target, sampling, 3, shape_of=constraints if constrained else lambda: None)
    monkeypatch.setattr(verification, "read_together", reading)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            DecodeLoop(target, planner).step(running)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
