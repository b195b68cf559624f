"""The shipped verifiers, replayed down every branch of their coins, return the target model's own law."""

from __future__ import annotations

import pytest
import torch
from helpers.enumeration import ExactStep, exact_step, toy_rows
from helpers.random_trees import Problem, independent_paths, random_problem, toy_model
from precedent.verify.batched import BatchedWeights

from precedent.errors import ConfigError
from precedent.sampling.rng import CounterRng, Rng
from precedent.testing.replay_rng import ReplayRng, enumerate_outcomes
from precedent.tree import EMPTY_TREE, NULL, ROOT, CandidateTree, Fixed, Sampled, TreeBuilder, chain
from precedent.verify import MODES, Verdict, Weights, find_mode, prepare, verify, walk

REJECTION_MODES = ("traversal", "topdown")
EXACT = 1e-12
FIRST, COUNT = 1000, 120
WAYS = pytest.mark.parametrize("way", ["reference", "ahead"])


def steps(problem: Problem, way: str) -> list[ExactStep]:
    """What `traversal` and `topdown` do with a problem."""
    return [exact_step(problem.target, problem.draft, verifier_of(mode, way)) for mode in REJECTION_MODES]


def verifier_of(mode: str, way: str) -> Verifier:
    """By the reference, row by row, or with every number computed before the walk."""
    if way == "reference":
        return LOSSLESS[mode]

    def prepare_ahead(tree: CandidateTree, rows: TargetRows) -> Decide:
        return lambda rng: walk(ahead_weights(tree, rows, mode), rng)

    return prepare_ahead


@WAYS
@pytest.mark.parametrize("block", range(FIRST, FIRST + COUNT, 10))
def test_random_mixed_trees_keep_the_law_and_lazy_accepts_no_less(block: int, way: str) -> None:
    """Points, draws, duplicates, exclusion, keep_mask, several draft models, zero and certain probabilities."""
    for seed in range(block, block + 10):
        problem = random_problem(seed, max_trees=81)
        lazy, eager = distributions(problem, way)
        assert lazy.total_variation(problem.target) < EXACT, problem
        assert eager.total_variation(problem.target) < EXACT, problem
        assert lazy.expected_accepted >= eager.expected_accepted - EXACT, problem


def test_the_random_trees_contain_every_feature() -> None:
    """The law test means nothing if the generator stopped making the hard cases."""
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
        "draw below point",
        "point below draw",
        "deep",
    }


def _features(tree: CandidateTree) -> set[str]:
    seen = {"deep"} if len(tree) and int(tree.depths.max()) >= 4 else set()
    for parent, draws in tree.candidates_at.items():
        drawn = [draw for candidate in draws if isinstance(candidate.distribution, Sampled)]
        children = [candidate.child for candidate in drawn if candidate.child != NULL]
        above = [candidate.distribution for candidate in tree.candidates if candidate.child == parent]
        is_mixed = 0 < len(drawn) < len(draws)
        seen |= {"mixed node"} if is_mixed else set()
        seen |= {"duplicate"} if len(set(children)) < len(children) else set()
        seen |= {"null"} if len(children) < len(drawn) else set()
        seen |= {"exclusion"} if any(candidate.distribution.excluded for candidate in drawn) else set()  # type: ignore[union-attr]
        seen |= {"models"} if len({id(candidate.distribution.row) for candidate in drawn}) > 1 else set()  # type: ignore[union-attr]
        seen |= (
            {"draw below point"} if drawn and any(isinstance(distribution, Fixed) for distribution in above) else set()
        )
        seen |= (
            {"point below draw"}
            if len(drawn) < len(draws) and any(isinstance(distribution, Sampled) for distribution in above)
            else set()
        )
    return seen


@WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
@pytest.mark.parametrize(
    ("vocab_size", "paths", "length"), [(2, 1, 4), (3, 1, 3), (5, 1, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2)]
)
def test_chains_and_merged_independent_paths_keep_the_law(
    mode: str, vocab_size: int, paths: int, length: int, way: str
) -> None:
    """Block and token verification on a chain; sequences drawn independently and merged into one tree."""
    target, draft = toy_model("target", vocab_size), toy_model("draft", vocab_size)
    distribution = exact_step(target, independent_paths(draft, paths, length), first_half_of(mode, way))
    assert distribution.total_variation(target) < EXACT
    assert sum(distribution.prefixes.values()) == pytest.approx(1.0, abs=EXACT)


@WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
@pytest.mark.parametrize("seed", range(8))
def test_all_point_trees_reach_their_upper_bound(mode: str, seed: int, way: str) -> None:
    """No lossless verifier accepts a node more often than the target writes its path; points attain that everywhere."""
    target = toy_model(seed, 3)
    tree = _fixed_tree([(0,), (0, 1), (0, 2), (0, 2, 2), (1,), (1, 0, 0, 1)])
    distribution = exact_step(target, lambda rng: tree, first_half_of(mode, way))
    bound = sum(_path_probability(target, tree.tokens_to(node)) for node in range(len(tree)))
    assert distribution.expected_accepted == pytest.approx(bound, abs=EXACT)
    assert distribution.total_variation(target) < EXACT


def _fixed_tree(paths: list[tuple[int, ...]]) -> CandidateTree:
    builder = TreeBuilder()
    for path in paths:
        node = ROOT
        for token in path:
            node = builder.add_fixed(node, token, "test")
    return builder.build()


def _path_probability(target, path: tuple[int, ...]) -> float:
    probability = 1.0
    for depth, token in enumerate(path):
        probability *= float(target(path[:depth])[token])
    return probability


def test_an_all_point_tree_asks_for_visited_rows_only() -> None:
    """A softmax over the whole tree is what the lazy rows are there to avoid."""
    tree = _fixed_tree([(0, 0, 0), (1, 1, 1), (2, 2, 2)])
    asked: list[int] = []

    def rows(node: int) -> torch.Tensor:
        asked.append(node)
        return torch.tensor([0.0, 1.0, 0.0])

    for mode in REJECTION_MODES:
        asked.clear()
        verdict = prepare(tree, rows, mode)(CounterRng(1, 0))  # type: ignore[arg-type]  # greedy alone needs argmax
        assert verdict == Verdict((3, 4, 5), 1, "bonus")
        assert sorted(asked) == [ROOT, 3, 4, 5]


def test_greedy_equals_argmax_decoding_on_every_tree() -> None:
    """Whatever was proposed, the committed tokens are those of plain greedy decoding, and as many as the tree holds."""
    for seed in range(40):
        problem = random_problem(seed, max_trees=16)
        for _, tree in enumerate_outcomes(problem.draft):
            verdict = verify(tree, toy_rows(problem.target, tree), "greedy", ReplayRng())
            committed = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
            expected: list[int] = []
            while len(expected) < len(committed):
                expected.append(int(problem.target(tuple(expected)).argmax()))
            assert committed == expected
            end = verdict.path[-1] if verdict.path else ROOT
            assert (end, verdict.next_token) not in set(zip(tree.parents, tree.token_ids, strict=True))


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    """Equal logits must not depend on what was proposed."""
    tree = chain([1, 1])
    rows = toy_rows(lambda path: torch.tensor([0.0, 0.5, 0.5, 0.0]), tree)
    assert verify(tree, rows, "greedy", ReplayRng()) == Verdict((0, 1), 1, "bonus")


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_temperature_zero_rows_accept_exactly_the_greedy_path(mode: str) -> None:
    """With one-hot rows the rejection modes and greedy agree, draws or points."""
    target = toy_model("any", 4)

    def one_hot(path: tuple[int, ...]) -> torch.Tensor:
        return torch.eye(4, dtype=torch.float64)[int(target(path).argmax())]

    for seed in range(20):
        problem = random_problem(seed, max_trees=16)
        if problem.vocab_size == 4:
            for _, tree in enumerate_outcomes(problem.draft):
                rows = toy_rows(one_hot, tree)
                greedy = verify(tree, rows, "greedy", ReplayRng())
                assert [verdict for _, verdict in enumerate_outcomes(prepare(tree, rows, mode))] == [greedy]


@pytest.mark.parametrize("mode", MODES)
def test_the_empty_tree_is_plain_decoding(mode: str) -> None:
    """No candidates: one bonus token from the target's row."""
    target = toy_model("plain", 3)
    for probability, verdict in enumerate_outcomes(prepare(EMPTY_TREE, toy_rows(target, EMPTY_TREE), mode)):
        assert verdict.path == ()
        assert verdict.kind == "bonus"
        assert verdict.num_accepted == 0
        expected = 1.0 if mode in ("greedy", "coupled") else float(target(())[verdict.next_token])
        assert probability == pytest.approx(expected)


def test_kind_says_whether_something_was_rejected() -> None:
    """Bonus after a fully accepted path, recovered where proposals were turned down."""
    tree = chain([2, 2])
    verdicts = {
        (verdict.num_accepted, verdict.kind)
        for _, verdict in enumerate_outcomes(prepare(tree, toy_rows(toy_model(3, 3, plain=True), tree), "traversal"))
    }
    assert verdicts == {(0, "recovered"), (1, "recovered"), (2, "bonus")}


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_draft_model_equal_to_the_target_is_always_accepted(mode: str) -> None:
    """The residual is identically zero there; no rounding may lead into it."""
    target = toy_model("same", 4)
    distribution = exact_step(target, independent_paths(target, 1, 3), mode)
    assert distribution.expected_accepted == pytest.approx(3.0, abs=EXACT)


@BACKENDS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_float32_rows_keep_the_law_up_to_rounding(mode: str, batched: bool) -> None:
    """The work is done in the rows' dtype, and its error stays at the size of float32 rounding."""
    for seed in range(30):
        problem = random_problem(seed, max_trees=27)
        single = {}

        def target(path: tuple[int, ...], problem=problem, single=single) -> torch.Tensor:
            return single.setdefault(path, problem.target(path).float())

        distribution = exact_step(target, problem.draft, find_mode(mode, batched=batched))
        assert distribution.total_variation(problem.target) < 2e-6


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rejecting_a_near_certain_point_in_float32_leaves_the_rest_in_proportion(mode: str) -> None:
    """B loses a token of probability 1 - 2e-7: the difference of floats would be all rounding, so it is summed anew."""
    row = torch.tensor([1.0 - 2e-7, 1.5e-7, 0.5e-7])
    builder = TreeBuilder()
    node = builder.add_fixed(ROOT, 0, "cache")
    builder.add_sampled(node, 1, Sampled(torch.tensor([0.0, 1.0, 0.0])), "draft")  # makes the point a trial of its own
    tree = builder.build()
    outcomes: dict[int, float] = {}
    for probability, verdict in enumerate_outcomes(prepare(tree, lambda node: row, mode)):  # type: ignore[arg-type]
        if not verdict.path:
            outcomes[verdict.next_token] = outcomes.get(verdict.next_token, 0.0) + probability
    assert outcomes[1] / outcomes[2] == pytest.approx(3.0, rel=1e-3)


@BACKENDS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_draw_from_a_law_without_mass_costs_nothing_but_itself(mode: str, batched: bool) -> None:
    """Cached siblings held all that could be drawn and something was drawn all the same: it cannot be accepted."""
    target, draft = toy_model("target", 3, plain=True), toy_model("draft", 3, plain=True)
    prefixes: dict[tuple[int, ...], float] = {}

    def drafted(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        above = builder.add_sampled(ROOT, rng.categorical(draft(()), ROOT, "draw"), Sampled(draft(())), "draft")
        builder.add_sampled(above, 2, Sampled(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), (0, 1)), "draft")
        return builder.build()

    for chance, tree in enumerate_outcomes(drafted):
        for probability, verdict in enumerate_outcomes(prepare(tree, toy_rows(target, tree), mode, batched=batched)):
            committed = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
            prefixes[committed] = prefixes.get(committed, 0.0) + chance * probability
    assert ExactStep(prefixes, 0.0, 0, 0).total_variation(target) < EXACT


@BACKENDS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rejecting_likely_points_one_after_the_other_leaves_the_chances_of_the_rest(mode: str, batched: bool) -> None:
    """Each rejection takes 99.8 % of what is left: rounding of the first must not become per cents of the third."""
    row = torch.tensor([0.998, 0.001996, 3e-6, 1e-6])
    builder = TreeBuilder()
    for token in range(3):
        node = builder.add_fixed(ROOT, token, "cache")
        builder.add_sampled(
            node, 0, Sampled(torch.tensor([1.0, 0.0, 0.0, 0.0])), "draft"
        )  # so that it is a trial of its own
    weights = prepare_weights(builder.build(), lambda node: row, mode, batched)
    worths = [weights.worth(ROOT, ordinal) for ordinal in range(3)]
    assert worths[2] == pytest.approx(float(row[2]) / float(row[2:].double().sum()), rel=1e-5)


def prepare_weights(tree: CandidateTree, row_of, mode: str, batched: bool) -> Weights | BatchedWeights:
    """The weights that a mode would walk over."""
    lazy = mode == "traversal"
    if not batched:
        return Weights(tree, row_of, lazy=lazy)
    return BatchedWeights(tree, torch.stack([row_of(node) for node in range(ROOT, len(tree))]), lazy=lazy)


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_verification_writes_to_none_of_its_inputs(mode: str) -> None:
    """Rows and draft rows are views into the models' buffers."""
    target_row, draft_row = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.2, 0.2])
    before = target_row.clone(), draft_row.clone()
    builder = TreeBuilder()
    builder.add_sampled(ROOT, 0, Sampled(draft_row), "a")
    builder.add_sampled(ROOT, 1, Sampled(draft_row, (0,), draft_row > 0.1), "a")
    builder.add_fixed(ROOT, 2, "b")
    for _ in enumerate_outcomes(prepare(builder.build(), lambda node: target_row, mode)):  # type: ignore[arg-type]
        pass
    assert torch.equal(target_row, before[0])
    assert torch.equal(draft_row, before[1])


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_masked_token_is_never_accepted_even_if_its_draft_law_is_wrong(mode: str) -> None:
    """Probability 0 under the target (a grammar mask) stays 0 for draws, for points and for lawless draws."""
    row = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for distribution in (Sampled(torch.tensor([1.0, 0.0])), Sampled(torch.tensor([0.0, 1.0]))):
        builder = TreeBuilder()
        builder.add_sampled(ROOT, 0, distribution, "draft")
        tree = builder.build()
        verdicts = [verdict for _, verdict in enumerate_outcomes(prepare(tree, lambda node: row, mode))]  # type: ignore[arg-type]
        assert verdicts == [Verdict((), 1, "recovered")]
    assert matching(chain([0]), lambda node: 1)(ReplayRng()) == Verdict((), 1, "recovered")


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_long_chain_needs_no_deep_stack(mode: str) -> None:
    """The walk is a loop: the deepest tree that settings allow stays far from Python's recursion limit."""
    row = torch.tensor([0.5, 0.5])
    builder, node = TreeBuilder(), ROOT
    for _ in range(256):
        node = builder.add_sampled(node, 0, Sampled(row), "draft")
    verdict = verify(builder.build(), lambda node: row, mode, CounterRng(0, 0))  # type: ignore[arg-type]
    assert verdict.num_accepted == 256
    assert verdict.kind == "bonus"


def test_an_unknown_mode_is_refused_by_name() -> None:
    """No silent fallback to another verifier."""
    with pytest.raises(ConfigError, match=r"mode='tokenwise'.*traversal"):
        verify(EMPTY_TREE, toy_rows(toy_model(0, 2), EMPTY_TREE), "tokenwise", ReplayRng())


def test_the_harness_refuses_a_coin_that_is_asked_for_twice() -> None:
    """Counter-based coins would answer the same twice, which independent branches would hide."""
    with pytest.raises(AssertionError, match="asked for twice"):
        list(enumerate_outcomes(lambda rng: (rng.bernoulli(0.5, 0, "x"), rng.bernoulli(0.5, 0, "x"))))


def test_the_harness_enumerates_with_exact_probabilities() -> None:
    """Two coins and a die: every outcome once, probabilities multiplied, impossible branches left out."""

    def run(rng: ReplayRng) -> tuple[bool, int]:
        coin = rng.bernoulli(0.25, 0, "coin")
        return coin, rng.categorical(torch.tensor([1.0, 0.0, 3.0] if coin else [1.0, 0.0, 0.0]), 0, "die")

    outcomes = {outcome: probability for probability, outcome in enumerate_outcomes(run)}  # type: ignore[arg-type]
    assert outcomes == {(True, 0): 0.0625, (True, 2): 0.1875, (False, 0): 0.75}
