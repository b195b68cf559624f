"""On a GPU a step reads once: the same verdicts as without, however many sequences, and nothing else waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.even_ids import grammar_and_penalties
from helpers.prefilled import PROMPT, VOCABULARY, as_on_a_gpu, fixed_tree, sequences, static_target, verified

from precedent.config import SamplingParams
from precedent.decoding import verification
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal
from precedent.grammar import constraint as constraint_module
from precedent.planning.costs import CostCurve
from precedent.planning.plan import Plan
from precedent.planning.planner import Planner
from precedent.sampling.row_shaper import RowShaper
from precedent.target import TargetModel
from precedent.tree import ROOT, Sampled, TreeBuilder
from precedent.verify.ahead import Ahead, read_together
from precedent_cuda.host_waits import HostWaits
from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture(autouse=True)
def masks_are_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "DURING_A_FORWARD", math.inf)


def constraints() -> RowShaper:
    return grammar_and_penalties(PROMPT)


def played(
    target: TargetModel, sampling: SamplingParams, shape_of: Callable[[], RowShaper | None] = lambda: None
) -> tuple[list[list[int]], int]:
    """The texts of three sequences that are decoded together, and how many nodes were proposed."""
    running, planner = sequences(target, sampling, 3, shape_of=shape_of), Planner(CostCurve())
    for _ in range(6):
        DecodeLoop(target, planner).step([sequence for sequence in running if not sequence.finished])
        assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
    return [sequence.output_ids for sequence in running], sum(one.stats.num_draft_tokens for one in running)


def likely_above(target: TargetModel, num_tokens: int) -> None:
    """Give the ids that no tokenizer has by far the largest logits or the smallest, half of the time each."""
    with torch.no_grad():
        target.model.get_output_embeddings().weight[num_tokens:] *= 50.0


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
    if num_tokens is not None:
        likely_above(target, num_tokens)
    running = sequences(target, sampling, 3, num_tokens, constraints if constrained else lambda: None)
    proposed = 0
    for _ in range(4):
        with torch.inference_mode(), HostWaits() as waits:
            DecodeLoop(target, planner).step(running)
        assert waits.names == ["resolve_neg"], "one list is read"
        assert all(sequence.error is None for sequence in running)
        assert num_tokens is None or max(max(sequence.output_ids) for sequence in running) < num_tokens
        proposed = sum(sequence.stats.num_draft_tokens for sequence in running)
    assert proposed > 0


# Failures


def test_one_sequence_that_cannot_be_verified_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    target, sampling = static_target(), SamplingParams(temperature=0.5)
    running = [*sequences(target, sampling, 1, mode="lossy_judge:name=nobody"), *sequences(target, sampling, 1)]
    DecodeLoop(target, Planner(CostCurve())).step(running)
    assert "no judge is called 'nobody'" in str(running[0].error)
    assert running[1].error is None
    assert running[1].output_ids


def test_of_sequences_verified_together_only_the_one_with_the_impossible_draft_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_a_gpu(monkeypatch)
    builder = TreeBuilder()
    builder.add_sampled(ROOT, 1, Sampled(torch.tensor([0.5, 0.5])), "draft of another vocabulary")
    running = sequences(static_target(), SamplingParams(temperature=0.5), 3)
    trees = [fixed_tree(0), builder.build(), fixed_tree(0)]
    proposals = [Proposal(sequence, Plan(), tree) for sequence, tree in zip(running, trees, strict=True)]
    found = verified(proposals, [torch.randn(len(tree) + 1, VOCABULARY) for tree in trees])
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
    """Of one step, however many trees it has: the later ones are verified row by row."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(verification, "DURING_A_FORWARD", 2e-3)
    clock = iter([0.0, *[1e-3] * 9, *[3e-3] * 99])
    monkeypatch.setattr(verification, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(constraint_module, "perf_counter", lambda: next(clock))
    ahead: list[int] = []
    monkeypatch.setattr(verification, "Ahead", lambda group: ahead.append(len(group)) or Ahead(group))
    running = sequences(static_target(), SamplingParams(), 3, shape_of=constraints)
    proposals = [Proposal(sequence, Plan(), fixed_tree(0)) for sequence in running]
    found = verified(proposals, [torch.randn(9, VOCABULARY) for _ in proposals])
    assert ahead == [1], "the first tree's masks were found in time"
    assert all(each.verdict.next_token in range(VOCABULARY) for each in found)
    assert len(found) == 3


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.3)], ids=["greedy", "sampled"])
def test_on_cuda_a_step_waits_once(
    sampling: SamplingParams, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA raises an error at any wait but the one read, for graphs that are replayed."""

    def allowed(read: Callable[[Sequence[Ahead]], None]) -> Callable[[Sequence[Ahead]], None]:
        def reading(pending: Sequence[Ahead]) -> None:
            torch.cuda.set_sync_debug_mode("default")
            read(pending)
            torch.cuda.set_sync_debug_mode("error")

        return reading

    target, planner = static_target("cuda"), Planner(CostCurve())
    for _ in range(3):  # every size that comes has been captured
        played(target, sampling)
    running = sequences(target, sampling, 3, shape_of=constraints if constrained else lambda: None)
    monkeypatch.setattr(verification, "read_together", allowed(read_together))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            DecodeLoop(target, planner).step(running)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
