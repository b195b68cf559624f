"""The shipped verifiers, replayed down every branch of their random numbers, keep the target's distribution."""

from __future__ import annotations

import pytest
import torch
from helpers.enumeration import ExactStep, ToyModel, exact_step, toy_rows
from helpers.known_weights import WAYS, verifier_of
from helpers.random_trees import Problem, always, independent_paths, random_problem, sibling_samples, toy_model

from precedent.sampling.rng import Rng
from precedent.tree import NULL, ROOT, CandidateTree, Fixed, Sampled, TreeBuilder
from precedent.verify import RowWeights
from precedent.verify.walk import Weights
from precedent_testing.replay_rng import enumerate_outcomes

REJECTION_MODES = ("traversal", "topdown")
EXACT = 1e-12
FIRST, COUNT = 1000, 120
SMALL = [(block, 10, 81) for block in range(FIRST, FIRST + COUNT, 10)]
LARGE = [pytest.param(block, 40, 1024, marks=pytest.mark.exhaustive) for block in range(20_000, 20_600, 40)]
"""First seed, number of problems, and the most trees of each: an hour's worth of doubt in some minutes."""

BOTH_WAYS = pytest.mark.parametrize("way", WAYS)


def steps(problem: Problem, way: str) -> list[ExactStep]:
    """What `traversal` and `topdown` do with a problem."""
    return [exact_step(problem.target, problem.draft, verifier_of(mode, way)) for mode in REJECTION_MODES]


@BOTH_WAYS
@pytest.mark.parametrize(("first", "count", "max_trees"), [*SMALL, *LARGE])
@pytest.mark.sampled(3)
def test_random_mixed_trees_keep_the_distribution_and_lazy_tests_accept_no_less(
    first: int, count: int, max_trees: int, way: str
) -> None:
    """Fixed and sampled candidates, duplicates, exclusion, keep_mask, several models, zeros and certainties."""
    for seed in range(first, first + count):
        problem = random_problem(seed, max_trees=max_trees)
        lazy, eager = steps(problem, way)
        assert lazy.total_variation(problem.target) < EXACT, problem
        assert eager.total_variation(problem.target) < EXACT, problem
        assert lazy.expected_accepted >= eager.expected_accepted - EXACT, problem


def test_the_random_trees_contain_every_feature() -> None:
    """The test above means nothing if the generator stopped making the hard cases."""
    seen: set[str] = set()
    for seed in range(FIRST, FIRST + COUNT):
        problem = random_problem(seed, max_trees=81)
        for _, tree in enumerate_outcomes(problem.draft):
            seen |= _features(tree)
    assert seen == {
        "mixed node",
        "duplicate",
        "null",
        "exclusion",
        "models",
        "sampled below fixed",
        "fixed below sampled",
        "deep",
    }


def _features(tree: CandidateTree) -> set[str]:
    seen = {"deep"} if len(tree) and int(tree.depths.max()) >= 4 else set()
    for parent, candidates in tree.candidates_at.items():
        sampled = [each for each in candidates if isinstance(each.distribution, Sampled)]
        distributions = [each.distribution for each in sampled]
        children = [each.child for each in sampled if each.child != NULL]
        above = [each.distribution for each in tree.candidates if each.child == parent]
        is_mixed = 0 < len(sampled) < len(candidates)
        below_fixed = any(isinstance(each, Fixed) for each in above)
        below_sampled = any(isinstance(each, Sampled) for each in above)
        seen |= {"mixed node"} if is_mixed else set()
        seen |= {"duplicate"} if len(set(children)) < len(children) else set()
        seen |= {"null"} if len(children) < len(sampled) else set()
        seen |= {"exclusion"} if any(each.excluded for each in distributions) else set()
        seen |= {"models"} if len({id(each.row) for each in distributions}) > 1 else set()
        seen |= {"sampled below fixed"} if sampled and below_fixed else set()
        seen |= {"fixed below sampled"} if len(sampled) < len(candidates) and below_sampled else set()
    return seen


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
@pytest.mark.parametrize(
    ("vocab_size", "paths", "length"), [(2, 1, 4), (3, 1, 3), (5, 1, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2)]
)
def test_chains_and_merged_independent_paths_keep_the_distribution(
    mode: str, vocab_size: int, paths: int, length: int, way: str
) -> None:
    """Block and token verification on a chain; sequences sampled independently and merged into one tree."""
    target, draft = toy_model("target", vocab_size), toy_model("draft", vocab_size)
    done = exact_step(target, independent_paths(draft, paths, length), verifier_of(mode, way))
    assert done.total_variation(target) < EXACT
    assert sum(done.prefixes.values()) == pytest.approx(1.0, abs=EXACT)


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
@pytest.mark.parametrize("seed", range(8))
def test_trees_of_fixed_candidates_reach_their_upper_bound(mode: str, seed: int, way: str) -> None:
    """No lossless verifier accepts a node more often than the target writes its path; here all nodes attain that."""
    target = toy_model(seed, 3)
    tree = _fixed_tree([(0,), (0, 1), (0, 2), (0, 2, 2), (1,), (1, 0, 0, 1)])
    done = exact_step(target, lambda rng: tree, verifier_of(mode, way))
    bound = sum(_path_probability(target, tree.tokens_to(node)) for node in range(len(tree)))
    assert done.expected_accepted == pytest.approx(bound, abs=EXACT)
    assert done.total_variation(target) < EXACT


def _fixed_tree(paths: list[tuple[int, ...]]) -> CandidateTree:
    builder = TreeBuilder()
    for path in paths:
        node = ROOT
        for token in path:
            node = builder.add_fixed(node, token, "test")
    return builder.build()


def _path_probability(target: ToyModel, path: tuple[int, ...]) -> float:
    probability = 1.0
    for depth, token in enumerate(path):
        probability *= float(target(path[:depth])[token])
    return probability


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_draft_model_equal_to_the_target_is_always_accepted(mode: str) -> None:
    """The residual is identically zero there; no rounding may lead into it."""
    target = toy_model("same", 4)
    done = exact_step(target, independent_paths(target, 1, 3), mode)
    assert done.expected_accepted == pytest.approx(3.0, abs=EXACT)


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_float32_rows_keep_the_distribution_up_to_rounding(mode: str, way: str) -> None:
    """The work is done in the rows' dtype, and its error stays at the size of float32 rounding."""
    for seed in range(30):
        problem = random_problem(seed, max_trees=27)
        single: dict[tuple[int, ...], torch.Tensor] = {}

        def target(path: tuple[int, ...], problem=problem, single=single) -> torch.Tensor:
            return single.setdefault(path, problem.target(path).float())

        done = exact_step(target, problem.draft, verifier_of(mode, way))
        assert done.total_variation(problem.target) < 2e-6


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rejecting_a_near_certain_fixed_candidate_in_float32_leaves_the_rest_in_proportion(mode: str, way: str) -> None:
    """B loses a token of probability 1 - 2e-7: a difference of floats would be all rounding, so it is summed again."""
    row = torch.tensor([1.0 - 2e-7, 1.5e-7, 0.5e-7])
    builder = TreeBuilder()
    node = builder.add_fixed(ROOT, 0, "cache")
    builder.add_sampled(node, 1, Sampled(torch.tensor([0.0, 1.0, 0.0])), "draft")  # so that its parent is tested
    tree = builder.build()
    outcomes: dict[int, float] = {}
    for probability, verdict in enumerate_outcomes(verifier_of(mode, way)(tree, toy_rows(always(row), tree))):
        if not verdict.path:
            outcomes[verdict.next_token] = outcomes.get(verdict.next_token, 0.0) + probability
    assert outcomes[1] / outcomes[2] == pytest.approx(3.0, rel=1e-3)


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_sample_from_a_distribution_without_mass_costs_nothing_but_itself(mode: str, way: str) -> None:
    """Cached siblings held all that could be sampled and something was sampled all the same: it cannot be accepted."""
    target, draft = toy_model("target", 3, plain=True), toy_model("draft", 3, plain=True)
    prefixes: dict[tuple[int, ...], float] = {}

    def drafted(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        above = builder.add_sampled(ROOT, rng.categorical(draft(()), ROOT, "sample"), Sampled(draft(())), "draft")
        builder.add_sampled(above, 2, Sampled(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), (0, 1)), "draft")
        return builder.build()

    for chance, tree in enumerate_outcomes(drafted):
        for probability, verdict in enumerate_outcomes(verifier_of(mode, way)(tree, toy_rows(target, tree))):
            committed = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
            prefixes[committed] = prefixes.get(committed, 0.0) + chance * probability
    assert ExactStep(prefixes, 0.0, 0, 0).total_variation(target) < EXACT


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rejecting_likely_fixed_candidates_in_turn_leaves_the_chances_of_the_rest(mode: str, way: str) -> None:
    """Each rejection takes 99.8 % of what is left: rounding of the first must not become per cents of the third."""
    row = torch.tensor([0.998, 0.001996, 3e-6, 1e-6])
    builder = TreeBuilder()
    for token in range(3):
        node = builder.add_fixed(ROOT, token, "cache")
        sampled = Sampled(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        builder.add_sampled(node, 0, sampled, "draft")  # so that its parent is tested
    weights = _weights(builder.build(), row, lazy=mode == "traversal", way=way)
    acceptance = [weights.acceptance(ROOT, ordinal) for ordinal in range(3)]
    assert acceptance[2] == pytest.approx(float(row[2]) / float(row[2:].double().sum()), rel=1e-5)


def _weights(tree: CandidateTree, row: torch.Tensor, *, lazy: bool, way: str) -> Weights:
    """The weights that a mode would walk over, where the target has the same row everywhere."""
    if way == "row by row":
        return RowWeights(tree, lambda node: row, lazy=lazy)
    from helpers.staged_weights import Weighed, weighed

    return weighed([Weighed(tree, row.expand(len(tree) + 1, -1), lazy)])()[0]


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [1e-7, 1e-10, 1e-35])
def test_nearly_certain_draft_distributions_keep_the_distribution(
    rest: float, dtype: torch.dtype, mode: str, way: str
) -> None:
    """What is left beside a nearly certain token is a distribution of its own once that token is excluded."""
    row = torch.tensor([1.0 - rest, rest * 0.6, rest * 0.3, rest * 0.1], dtype=dtype)
    for target in (torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=dtype), row):
        for number, replacement in ((3, False), (2, True)):
            process = sibling_samples([row] * number, replacement=replacement)
            done = exact_step(always(target), process, verifier_of(mode, way))
            assert done.total_variation(always(target.double())) < (1e-12 if dtype == torch.float64 else 1e-6)
            assert all(probability >= 0.0 for probability in done.prefixes.values())
