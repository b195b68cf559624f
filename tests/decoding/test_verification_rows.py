"""Rows of sequences that are verified together: normalised one by one where bits count, and gone with their step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.prefilled import (
    VOCABULARY,
    as_on_a_gpu,
    fixed_tree,
    noting_probabilities,
    sequences,
    static_target,
    verified,
)

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal
from precedent.planning.costs import CostCurve
from precedent.planning.plan import Plan
from precedent.planning.planner import Planner
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder


def sampled_tree() -> CandidateTree:
    """A chain of samples beside a fixed candidate."""
    generator, builder, node = torch.Generator().manual_seed(1), TreeBuilder(), ROOT
    builder.add_fixed(ROOT, 3, "cache")
    for token in (4, 5, 6):
        row = torch.rand(VOCABULARY, generator=generator).softmax(0)
        node = builder.add_sampled(node, token, Sampled(row, builder.children(node)), "draft")
    return builder.build()


@pytest.mark.parametrize("bitwise", [True, False])
def test_seeded_rows_are_normalised_one_by_one_where_bits_must_not_depend_on_how_many(
    bitwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cumulative sum over several rows at once may be cut otherwise than one over a row alone."""
    shapes: list[int] = []
    as_on_a_gpu(monkeypatch)
    noting_probabilities(monkeypatch, lambda logits, found: shapes.append(logits.dim()))
    target, seeded = static_target(), SamplingParams(temperature=0.3, seed=3, top_p=0.9)
    running = sequences(target, seeded, 1, mode="coupled", bitwise=bitwise)[0]
    DecodeLoop(target, Planner(CostCurve())).step([running])
    assert running.error is None
    assert set(shapes) == {1 if bitwise else 2}


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
        proposals = [Proposal(sequence, Plan(), tree) for sequence, tree in zip(running, trees, strict=True)]
        logits = [torch.randn(len(tree) + 1, VOCABULARY) for tree in trees]
        gone += [weakref.ref(each) for each in logits]
        found = verified(proposals, logits)
        assert len(found) == 2
        del found, logits
        assert len(gone) == 2 + (mode != "greedy")
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
