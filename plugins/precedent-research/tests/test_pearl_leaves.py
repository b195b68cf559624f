"""Leaves with a made-up row: what was sampled while the target scored the tree is verified like any other candidate.

When a walk ends at such a leaf, its token is committed; the next step decides what follows.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
import torch
from helpers.enumeration import ExactStep, ToyModel, exact_step
from helpers.known_weights import WAYS, verifier_of
from helpers.random_trees import Problem, independent_paths, random_problem

from precedent.config import SamplingParams
from precedent.sampling.coupling import coupled_choice
from precedent.sampling.rng import CounterRng, Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import NULL, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Verdict, verify
from precedent_research.pearl import with_made_up_rows, without_made_up
from precedent_testing.replay_rng import ReplayRng, enumerate_outcomes
from precedent_testing.trees import check_tree

EXACT = 1e-12


def with_leaves(problem: Problem, tree: CandidateTree, rng: Rng) -> CandidateTree:
    """The tree, and below some of its nodes a sample or a fixed leaf more; which nodes depends on their paths alone."""
    builder = TreeBuilder.reopened(tree)
    for node in range(ROOT, len(tree)):
        path = tree.tokens_to(node)
        choose = random.Random(f"{problem.seed} {path}")
        kind = choose.choice(["sampled", "fixed", "none"])
        if kind == "sampled" and len(path) < 3:
            row = problem.draft_models[0](path)
            masked = Sampled(row, (), row >= 0.2) if choose.random() < 0.3 else Sampled(row)
            builder.add_sampled(node, rng.categorical(row, node, "late"), masked, "late")
        elif kind == "fixed" and len(path) < 3:
            builder.add_fixed(node, choose.randrange(problem.vocab_size), "late")
    extended = builder.build()
    check_tree(extended)
    return extended


def rows_over(model: ToyModel, tree: CandidateTree, num_scored: int, seed: int = 0) -> TargetRows:
    """The model's rows over the scored nodes, and made-up ones over the leaves."""
    logits = torch.stack([model(tree.tokens_to(node)) for node in range(ROOT, num_scored)]).log()
    return TargetRows(with_made_up_rows(logits, len(tree)), tree, SamplingParams(temperature=1.0, seed=seed))


def tokens_of(tree: CandidateTree, verdict: Verdict) -> tuple[int, ...]:
    return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)


def two_steps(problem: Problem, mode: str, way: str, seen: Counter[str]) -> ExactStep:
    """A step over trees with such leaves, and a sample verified after whatever it committed."""
    verifier, scored = verifier_of(mode, way), list[int]()

    def draft(rng: Rng) -> CandidateTree:
        tree = problem.draft(rng)
        scored[:] = [len(tree)]
        return with_leaves(problem, tree, rng)

    prefixes: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, tree in enumerate_outcomes(draft):
        (num_scored,) = scored
        for probability, found in enumerate_outcomes(verifier(tree, rows_over(problem.target, tree, num_scored))):
            note(tree, found, num_scored, seen)
            text = tokens_of(tree, without_made_up(found, tree, num_scored))
            prefixes[text] += chance * probability
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for text, probability in prefixes.items():
        paths = independent_paths(after(problem.draft_models[0], text), 1, 1)
        for more, chance in exact_step(after(problem.target, text), paths, verifier).prefixes.items():
            total[(*text, *more)] += probability * chance
    return ExactStep(total, 0.0, 0, 0)


def after(model: ToyModel, text: tuple[int, ...]) -> ToyModel:
    """The same model after a committed text."""
    return lambda path: model((*text, *path))


def note(tree: CandidateTree, verdict: Verdict, num_scored: int, seen: Counter[str]) -> None:
    """Count what happened to the leaves, so that the test cannot pass without any."""
    kinds = {each.child: type(each.distribution) for each in tree.candidates if each.child >= num_scored}
    end = verdict.path[-1] if verdict.path else ROOT
    if end in kinds:
        seen["sampled leaf accepted" if kinds[end] is Sampled else "fixed leaf accepted"] += 1
    elif any(tree.parents[leaf] == end for leaf in kinds):
        seen["rejected"] += 1
    seen["dropped by a mask"] += any(each.child == NULL for each in tree.candidates)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_two_steps_with_leaves_keep_the_distribution(mode: str, way: str) -> None:
    """All strings of two steps, over every tree, every leaf sampled late and every verdict."""
    seen: Counter[str] = Counter()
    for seed in range(3000, 3060 if way == "row by row" else 3027):
        problem = random_problem(seed, max_trees=9)
        if problem.vocab_size <= 3:
            done = two_steps(problem, mode, way, seen)
            assert sum(done.prefixes.values()) == pytest.approx(1.0, abs=EXACT)
            assert done.total_variation(problem.target) < EXACT, problem
    assert set(seen) == {"sampled leaf accepted", "fixed leaf accepted", "rejected", "dropped by a mask"}
    assert min(seen.values()) > 30


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_exact_match_with_leaves_commits_the_text_of_plain_decoding(mode: str) -> None:
    """Greedy decoding's, or that of the seed's noise; and as many of its tokens as the tree holds."""
    at_leaves = 0
    for seed in range(3000, 3160):
        problem = random_problem(seed, max_trees=9)
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            late = with_leaves(problem, tree, CounterRng(seed, number))
            found = verify(late, rows_over(problem.target, late, len(tree), seed), mode, ReplayRng())
            text: tuple[int, ...] = ()
            for token in tokens_of(late, without_made_up(found, late, len(tree))):
                row = problem.target(text)
                assert token == (int(row.argmax()) if mode == "greedy" else coupled_choice(row, seed, len(text)))
                text = (*text, token)
            at_leaves += bool(found.path) and found.path[-1] >= len(tree)
    assert at_leaves > 50
