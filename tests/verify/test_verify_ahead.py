"""Verdicts read together: those of the same random numbers row by row, in as many operations as one of them takes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers.even_ids import grammar_and_penalties
from helpers.operations import Operations
from helpers.prefilled import noting_probabilities

from precedent.config import SamplingParams
from precedent.errors import GenerationError
from precedent.sampling.rng import CounterRng, categorical_rows
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import verify
from precedent.verify.ahead import LAZY, MOST_AT_ONCE, Ahead, Scored, computed_alike, read_together

VOCABULARY = 40
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


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


def fixed_tree(seed: int) -> CandidateTree:
    """A chain and its siblings, as memory proposes them."""
    generator, builder, node = torch.Generator().manual_seed(seed), TreeBuilder(), ROOT
    for _ in range(4):
        likely, other = torch.randperm(6, generator=generator)[:2].tolist()
        builder.add_fixed(node, other, "cache")
        node = builder.add_fixed(node, likely, "cache")
    return builder.build()


def target_rows(tree: CandidateTree, seed: int) -> TargetRows:
    logits = torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
    return TargetRows(logits, tree, SAMPLED)


def read_ahead(scored: Sequence[Scored], most_at_once: int = MOST_AT_ONCE) -> int:
    """Compute and read what all of them need for their verdicts; returns how many groups were computed together."""
    groups = [Ahead(together) for together in computed_alike(scored, most_at_once=most_at_once)]
    read_together(groups)
    return len(groups)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_verdicts_read_together_are_those_of_the_same_random_numbers(mode: str) -> None:
    """Many trees, several at once, with samples and of fixed candidates alone; paths of all lengths occur."""
    lengths = set()
    for start in range(0, 120, 3):
        numbers = range(start, start + 3)
        trees = [fixed_tree(start), mixed_tree(start + 1), mixed_tree(start + 2)]
        modes = [mode, *sorted(LAZY)]
        scored = [
            Scored(tree, target_rows(tree, number), CounterRng(7, number), its)
            for number, tree, its in zip(numbers, trees, modes, strict=True)
        ]
        assert read_ahead(scored) == 1
        for number, tree, found in zip(numbers, trees, scored, strict=True):
            verdict = found.verdict()
            expected = verify(tree, target_rows(tree, number), found.mode, CounterRng(7, number))
            assert verdict == expected, "as row by row"
            lengths.add(len(verdict.path))
    assert {0, 1, 2} <= lengths


def test_rows_of_different_distributions_are_not_computed_together() -> None:
    """Greedy ones have none: they go together, whatever else was asked for."""
    tree = fixed_tree(0)
    logits = torch.randn(len(tree) + 1, VOCABULARY)
    asked = [(SAMPLED, "traversal"), (SamplingParams(temperature=0.5), "topdown"), (SamplingParams(), "greedy")]
    asked += [(SamplingParams(top_k=3), "greedy"), (SAMPLED, "topdown")]
    asked += [(replace(SAMPLED, seed=seed), "coupled") for seed in (1, 2)]
    scored = [Scored(tree, TargetRows(logits, tree, params), CounterRng(1, 1), mode) for params, mode in asked]
    groups = [[scored.index(each) for each in group] for group in computed_alike(scored)]
    assert sorted(groups) == [[0, 4], [1], [2, 3], [5, 6]]
    read_ahead(scored)
    for each, (params, mode) in zip(scored, asked, strict=True):
        assert each.verdict() == verify(tree, TargetRows(logits, tree, params), mode, CounterRng(1, 1))


def test_no_more_is_computed_together_than_fits() -> None:
    most = 20 * VOCABULARY
    trees = [fixed_tree(number) for number in range(5)]
    scored = [Scored(tree, target_rows(tree, 0), CounterRng(1, i), "traversal") for i, tree in enumerate(trees)]
    assert [len(group) for group in computed_alike(scored, most_at_once=most)] == [2, 2, 1]
    assert read_ahead(scored, most) == 3
    for i, each in enumerate(scored):
        assert each.verdict() == verify(each.tree, target_rows(each.tree, 0), "traversal", CounterRng(1, i))


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
    """Launching is what a small operation costs on a GPU: 20 of them take a hundredth of a step."""
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.7)

    def operations(count: int) -> int:
        trees = [tree] * count
        rows = [TargetRows(torch.randn(len(tree) + 1, VOCABULARY), tree, params) for tree in trees]
        scored = [Scored(tree, its, CounterRng(1, 1), mode) for tree, its in zip(trees, rows, strict=True)]
        with Operations() as counting:
            read_ahead(scored)
        return len(counting.launched)

    assert operations(8) <= operations(1) + 2 <= most


def test_tokens_of_all_rows_are_those_of_one_row_after_the_other() -> None:
    """Rows that sum to anything, with nothing in front, behind, or but in one place; numbers at both ends."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 30, generator=generator)
    weights[torch.rand(200, 30, generator=generator) < 0.5] = 0.0
    weights[:, :3], weights[::2, -4:], weights[:, 7] = 0.0, 0.0, 0.1
    weights[0] = 0.0
    weights[0, 11] = 1e-9
    rng = CounterRng(3, 0)
    uniforms = torch.tensor([rng.uniform(row, "x") for row in range(200)], dtype=torch.float64)
    expected = [rng.categorical(row, number, "x") for number, row in enumerate(weights)]
    assert categorical_rows(weights, uniforms).tolist() == expected
    for uniform in (0.0, 1.0 - 2.0**-53):
        found = categorical_rows(weights, torch.full((200,), uniform, dtype=torch.float64))
        assert weights.gather(1, found[:, None]).gt(0).all(), "a token without mass is never sampled"


def test_a_row_that_cannot_be_sampled_fails_when_the_walk_reaches_it() -> None:
    tree = mixed_tree(1)
    logits = torch.randn(len(tree) + 1, VOCABULARY)
    logits[0, 3] = torch.nan
    seeded = replace(SAMPLED, seed=1)
    for params, mode in (
        (SAMPLED, "traversal"),
        (SAMPLED, "topdown"),
        (SamplingParams(), "greedy"),
        (seeded, "coupled"),
    ):
        scored = Scored(tree, TargetRows(logits, tree, params), CounterRng(1, 1), mode)
        read_ahead([scored])
        with pytest.raises(GenerationError, match="NaN"):
            scored.verdict()


@pytest.mark.parametrize("mode", ["greedy", "traversal", "topdown", "coupled"])
def test_verdicts_are_the_same_when_masks_take_long(mode: str) -> None:
    """Then rows are computed where the walk goes."""
    params, compared = SamplingParams(temperature=0.0 if mode == "greedy" else 0.9, seed=3), 0
    for until in (math.inf, -math.inf):
        for seed in range(30):
            tree = mixed_tree(seed) if seed % 2 and mode in LAZY else fixed_tree(seed)
            logits = torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
            rows = TargetRows(logits, tree, params, (), grammar_and_penalties(PROMPT))
            constrained = rows.constrained(until)
            assert (constrained is not None) is (until > 0)
            reference = TargetRows(logits, tree, params, (), grammar_and_penalties(PROMPT))
            expected = verify(tree, reference, mode, CounterRng(7, seed))
            if constrained is not None:
                scored = Scored(tree, constrained, CounterRng(7, seed), mode)
                read_ahead([scored])
                assert scored.verdict() == expected
                compared += 1
            else:
                assert verify(tree, rows, mode, CounterRng(7, seed)) == expected
    assert compared == 30


@pytest.mark.parametrize("mode", ["traversal", "coupled"])
def test_distributions_go_before_they_are_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and tokens are all that is kept: `MOST_AT_ONCE` bounds what several groups take, one after the other."""
    gone: list[weakref.ref[torch.Tensor]] = []
    noting_probabilities(monkeypatch, lambda logits, found: gone.append(weakref.ref(found)))
    trees, params = [mixed_tree(1), mixed_tree(2)], replace(SAMPLED, seed=4)
    rows = [TargetRows(torch.randn(len(tree) + 1, VOCABULARY), tree, params) for tree in trees]
    scored = [Scored(tree, its, CounterRng(1, 1), mode) for tree, its in zip(trees, rows, strict=True)]
    ahead = Ahead(scored)
    assert [each() for each in gone] == [None]
    read_together([ahead])
    assert all(0 <= each.verdict().next_token < VOCABULARY for each in scored)
