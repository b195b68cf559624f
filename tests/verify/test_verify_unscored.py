"""Leaves without a row: what a draft model sampled while the target scored the tree is verified as any other candidate.

A walk that ends at such a leaf commits its token; what follows is for the next step, which scores it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
import torch
from helpers.enumeration import ExactStep, ToyModel, exact_step, toy_rows
from helpers.known_weights import WAYS, verifier_of
from helpers.random_trees import Problem, always, independent_paths, random_problem

from precedent.config import SamplingParams
from precedent.sampling.coupling import coupled_choice
from precedent.sampling.rng import CounterRng, Rng
from precedent.sampling.target_rows import TargetRows
from precedent.testing.host_waits import HostWaits
from precedent.testing.replay_rng import ReplayRng, enumerate_outcomes
from precedent.tree import NULL, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Decide, Verdict, verify
from precedent.verify.ahead import Ahead, Scored, computed_alike, read_together

EXACT = 1e-12
REJECTION_MODES = ("traversal", "topdown")
EXACT_MATCH = ("greedy", "coupled")


def with_unscored(problem: Problem, tree: CandidateTree, rng: Rng) -> CandidateTree:
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
    late = builder.build(num_unscored=len(builder) - len(tree))
    late.check()
    return late


def behind(model: ToyModel, text: tuple[int, ...]) -> ToyModel:
    """The same model behind a committed text."""
    return lambda path: model((*text, *path))


def tokens_of(tree: CandidateTree, verdict: Verdict) -> tuple[int, ...]:
    return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)


def two_steps(problem: Problem, mode: str, way: str, seen: Counter[str]) -> ExactStep:
    """A step over trees with unscored leaves, and a sample verified behind whatever it committed."""
    verifier = verifier_of(mode, way)

    def noting(tree: CandidateTree, rows: TargetRows) -> Decide:
        decide = verifier(tree, rows)
        return lambda rng: note(tree, decide(rng), seen)

    first = exact_step(problem.target, lambda rng: with_unscored(problem, problem.draft(rng), rng), noting)
    prefixes: dict[tuple[int, ...], float] = defaultdict(float)
    for text, probability in first.prefixes.items():
        draft = independent_paths(behind(problem.draft_models[0], text), 1, 1)
        second = exact_step(behind(problem.target, text), draft, verifier)
        for more, chance in second.prefixes.items():
            prefixes[(*text, *more)] += probability * chance
    return ExactStep(prefixes, first.expected_accepted, first.num_trees, first.num_outcomes)


def note(tree: CandidateTree, verdict: Verdict, seen: Counter[str]) -> Verdict:
    """Return the verdict; count what happened to unscored leaves, so that the test cannot pass without any."""
    leaves = range(tree.num_scored, len(tree))
    kinds = {each.child: type(each.distribution) for each in tree.candidates if each.child in leaves}
    if verdict.next_node is not None:
        assert verdict.next_node in leaves
        seen["sampled leaf accepted" if kinds[verdict.next_node] is Sampled else "fixed leaf accepted"] += 1
    elif any(tree.parents[leaf] == (verdict.path[-1] if verdict.path else ROOT) for leaf in leaves):
        seen["rejected"] += 1
    seen["dropped by a mask"] += any(each.child == NULL for each in tree.candidates)
    return verdict


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_two_steps_with_unscored_leaves_keep_the_distribution(mode: str, way: str) -> None:
    """All strings of two steps, over every tree, every leaf sampled late and every verdict."""
    seen: Counter[str] = Counter()
    for seed in range(3000, 3090 if way == "row by row" else 3040):
        problem = random_problem(seed, max_trees=9)
        if problem.vocab_size <= 3:
            done = two_steps(problem, mode, way, seen)
            assert sum(done.prefixes.values()) == pytest.approx(1.0, abs=EXACT)
            assert done.total_variation(problem.target) < EXACT, problem
    assert set(seen) == {"sampled leaf accepted", "fixed leaf accepted", "rejected", "dropped by a mask"}
    assert min(seen.values()) > 30


@pytest.mark.parametrize("mode", EXACT_MATCH)
def test_exact_match_with_unscored_leaves_commits_the_text_of_plain_decoding(mode: str) -> None:
    """Greedy decoding's, or that of the seed's noise; and as many of its tokens as the tree holds."""
    at_leaves = 0
    for seed in range(3000, 3160):
        problem = random_problem(seed, max_trees=9)
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            late = with_unscored(problem, tree, CounterRng(seed, number))
            verdict = verify(late, toy_rows(problem.target, late, seed), mode, ReplayRng())
            text: tuple[int, ...] = ()
            for token in tokens_of(late, verdict):
                row = problem.target(text)
                assert token == (int(row.argmax()) if mode == "greedy" else coupled_choice(row, seed, len(text)))
                text = (*text, token)
            edges = dict(zip(zip(late.parents, late.token_ids, strict=True), range(len(late)), strict=True))
            end = verdict.path[-1] if verdict.path else ROOT
            assert edges.get((end, verdict.next_token)) == verdict.next_node
            at_leaves += verdict.next_node is not None
    assert at_leaves > 50


@pytest.mark.parametrize("mode", [*REJECTION_MODES, *EXACT_MATCH])
def test_trees_with_unscored_leaves_read_together_have_the_verdicts_that_each_has_alone(mode: str) -> None:
    """There are more nodes than rows then, in every tree by another number."""
    by_size: dict[int, list[tuple[CandidateTree, ToyModel, int]]] = defaultdict(list)
    for seed in range(3000, 3160):
        problem = random_problem(seed, max_trees=9)
        for number, (_, tree) in enumerate(enumerate_outcomes(problem.draft)):
            late = with_unscored(problem, tree, CounterRng(seed, number))
            by_size[problem.vocab_size].append((late, problem.target, seed))
    at_leaves = 0
    for trees in by_size.values():
        scored = [
            Scored(tree, toy_rows(target, tree, 5), CounterRng(seed, number), mode)
            for number, (tree, target, seed) in enumerate(trees)
        ]
        read_together([Ahead(group) for group in computed_alike(scored)])
        for number, (each, (tree, target, seed)) in enumerate(zip(scored, trees, strict=True)):
            verdict = each.verdict()
            assert verdict == verify(tree, toy_rows(target, tree, 5), mode, CounterRng(seed, number))
            at_leaves += verdict.next_node is not None
    assert at_leaves > 50


@pytest.mark.parametrize("mode", [*REJECTION_MODES, *EXACT_MATCH])
def test_a_verdict_that_ends_at_an_unscored_leaf_says_so(mode: str) -> None:
    """Its path has a row at each node; the leaf is accepted, and its token is the one that is added."""
    builder = TreeBuilder()
    leaf = builder.add_fixed(builder.add_fixed(ROOT, 1, "a"), 1, "late")
    tree = builder.build(num_unscored=1)
    rows = toy_rows(always(torch.tensor([0.0, 1.0])), tree)
    verdict = verify(tree, rows, mode, CounterRng(0, 0))
    assert len(rows) == tree.num_scored + 1 == 2
    assert verdict == Verdict((0,), 1, "bonus", next_node=leaf)
    assert verdict.accepted == (0, leaf)
    assert verdict.num_accepted == 2


def test_a_node_below_an_unscored_one_breaks_an_invariant() -> None:
    builder = TreeBuilder()
    builder.add_fixed(builder.add_fixed(ROOT, 1, "a"), 1, "late")
    with pytest.raises(ValueError, match="hangs below one that was not scored"):
        builder.build(num_unscored=2).check()


def tree_of(seed: int, num_samples: int, num_unscored: int = 0) -> CandidateTree:
    """A fixed candidate and a chain of samples; with one more it is the same tree and a leaf."""
    generator, builder, node = torch.Generator().manual_seed(seed), TreeBuilder(), ROOT
    builder.add_fixed(ROOT, 1, "cache")
    for _ in range(num_samples):
        distribution = Sampled(torch.rand(5, generator=generator).softmax(0), builder.children(node))
        token = int(torch.multinomial(distribution.probs(), 1, generator=generator))
        node = builder.add_sampled(node, token, distribution, "draft")
    return builder.build(num_unscored)


@pytest.mark.parametrize("mode", [*REJECTION_MODES, *EXACT_MATCH])
def test_unscored_leaves_are_verified_with_one_read(mode: str) -> None:
    """Together with the tree of another sequence; both verdicts are those of the same random numbers row by row."""
    params, used = SamplingParams(temperature=0.0 if mode == "greedy" else 0.8, seed=2), 0
    for number in range(150):
        tree, extended = tree_of(number, 1), tree_of(number, 2, num_unscored=1)
        logits = torch.randn(len(tree) + 1, 5, generator=torch.Generator().manual_seed(number)).mul(0.3)
        scored = [
            Scored(extended, TargetRows(logits, extended, params), CounterRng(3, number), mode),
            Scored(tree, TargetRows(logits, tree, params), CounterRng(4, number), mode),
        ]
        with torch.inference_mode(), HostWaits() as waits:
            read_together([Ahead(together) for together in computed_alike(scored)])
            verdicts = [each.verdict() for each in scored]
        assert waits.names == ["resolve_neg"], "one list is read"
        expected = verify(extended, TargetRows(logits, extended, params), mode, CounterRng(3, number))
        assert verdicts[0] == expected
        assert verdicts[1] == verify(tree, TargetRows(logits, tree, params), mode, CounterRng(4, number))
        used += verdicts[0].next_node == len(tree)
    assert used > 0
