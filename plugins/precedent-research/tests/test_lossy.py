"""The `lossy_*` modes write the distribution that their rule names, within their bound, and say what they spent."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from helpers.enumeration import exact_step, mean_spent, toy_rows
from helpers.forked import run
from helpers.random_trees import (
    DRAFT_V4,
    TARGET_V4,
    always,
    random_distribution,
    random_problem,
    sibling_samples,
    toy_model,
)
from helpers.small_engines import PROMPT, make_engine
from scipy.optimize import minimize

from precedent.config import MODE_GROUP, MODES, SamplingParams, SpeculationConfig
from precedent.engine.checks import mode_of
from precedent.errors import ConfigError
from precedent.runtime.plugins import installed
from precedent.sampling.rng import CounterRng, Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder, chain
from precedent.verify import verifier_of, verify
from precedent_research.lossy import RULES, Mentored, Offer, TopBeta, Typical
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import tiny_causal_lm

NOTHING = torch.zeros(4, dtype=torch.float64)
RULE_MODES = {
    "lossy_mentored:kl=0.05": Mentored(0.05),
    "lossy_mentored:kl=0.5": Mentored(0.5),
    "lossy_typical:epsilon=0.3,delta=0.6": Typical(0.3, 0.6),
    "lossy_top_beta:beta=3,tau=2": TopBeta(3, 2.0),
}
EXACT = 1e-12


def offer(target: torch.Tensor, draft: torch.Tensor, fixed: tuple[int, ...] = ()) -> Offer:
    """What a rule sees when these were proposed."""
    return Offer(target, target.log(), draft, fixed)


def divergence(target: torch.Tensor, written: torch.Tensor) -> float:
    """KL(target || written) in nats."""
    return float(torch.where(target > 0, target * (target / written).log(), 0.0).sum())


def total_variation(left: torch.Tensor, right: torch.Tensor) -> float:
    return 0.5 * float((left - right).abs().sum())


@pytest.mark.parametrize("seed", range(40))
def test_mentored_stays_within_its_bound_and_on_the_targets_support(seed: int) -> None:
    """Random distributions with zeros and certain tokens, cached tokens, sub-probabilities."""
    source = random.Random(seed)
    size = source.randint(2, 6)
    target, draft = random_distribution(source, size), random_distribution(source, size)
    fixed = tuple(source.sample(range(size), source.randint(0, size - 1)))
    draft[list(fixed)] = 0.0
    draft = draft / draft.sum() if bool(draft.sum() > 0) else draft
    draft = draft * source.choice([1.0, 1.0, 0.6, 0.0])
    kl = source.choice([0.0, 0.001, 0.1, 1.0])
    distribution = Mentored(kl)(offer(target, draft, fixed))
    assert float(distribution.sum()) == pytest.approx(1.0, abs=EXACT)
    assert float(distribution.min()) >= 0.0
    assert not bool((distribution[target == 0.0] > 0.0).any())
    assert divergence(target, distribution) <= kl + 1e-9
    if kl == 0.0:
        assert total_variation(distribution, target) < 1e-6  # KL is quadratic in the distance: sqrt of float rounding


@pytest.mark.parametrize("fixed", [(), (2,), (1, 3)])
def test_no_distribution_within_the_bound_accepts_more_than_mentored(fixed: tuple[int, ...]) -> None:
    """Against a numerical optimiser over all distributions on four tokens."""
    draft = DRAFT_V4.clone()
    draft[list(fixed)] = 0.0
    draft = draft / draft.sum()

    def accepted(distribution: torch.Tensor) -> float:
        covered = torch.minimum(distribution, draft)
        covered[list(fixed)] = distribution[list(fixed)]
        return float(covered.sum())

    ours = accepted(Mentored(0.05)(offer(TARGET_V4, draft, fixed)))
    bound = {"type": "ineq", "fun": lambda x: 0.05 - divergence(TARGET_V4, torch.tensor(x))}
    total = {"type": "eq", "fun": lambda x: x.sum() - 1.0}
    best = max(
        -minimize(
            lambda x: -accepted(torch.tensor(x)),
            random_distribution(random.Random(start), 4, plain=True).numpy(),
            bounds=[(1e-6, 1.0)] * 4,
            constraints=[bound, total],
        ).fun
        for start in range(12)
    )
    assert ours == pytest.approx(best, abs=2e-3)
    assert ours >= best - 1e-6


def distribution_at_root(draft: Callable[[Rng], CandidateTree], mode: str) -> tuple[torch.Tensor, float]:
    """The exact distribution of the first committed token for the V4 target, and the mean of what was spent."""
    distribution, spent = torch.zeros(4, dtype=torch.float64), 0.0
    for chance, tree in enumerate_outcomes(draft):
        for probability, verdict in enumerate_outcomes(verifier_of(mode)(tree, toy_rows(always(TARGET_V4), tree))):
            first = tree.token_ids[verdict.path[0]] if verdict.path else verdict.next_token
            distribution[first] += chance * probability
            spent += chance * probability * verdict.spent_tv
    return distribution, spent


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("fixed", "exclude"), [((), False), ((3,), True), ((3,), False), ((0, 1), True)])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("mode", RULE_MODES)
@pytest.mark.sampled(5)
def test_one_level_writes_exactly_the_rules_distribution_and_reports_exactly_its_distance(
    mode: str, number: int, fixed: tuple[int, ...], exclude: bool, replacement: bool
) -> None:
    """Samples, cached tokens and both: the rule's distribution comes out, its distance is what was spent."""
    draft = sibling_samples([DRAFT_V4] * number, fixed=fixed, replacement=replacement, exclude_fixed=exclude)
    distribution, spent = distribution_at_root(draft, mode)
    seen = fixed if exclude or not number else ()
    draft_probs = Sampled(DRAFT_V4, seen).probs() if number else NOTHING
    expected = RULE_MODES[mode](offer(TARGET_V4, draft_probs, seen)) if number or fixed else TARGET_V4
    assert torch.allclose(distribution, expected, rtol=0, atol=EXACT)
    assert spent == pytest.approx(total_variation(distribution, TARGET_V4), abs=EXACT)


@pytest.mark.parametrize(
    "seeds",
    [
        range(1000, 1016),
        *(pytest.param(range(at, at + 40), marks=pytest.mark.exhaustive) for at in range(20_000, 20_600, 40)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", RULE_MODES)
@pytest.mark.sampled(2)
def test_on_random_trees_the_spent_variation_bounds_the_true_one(mode: str, seeds: range) -> None:
    """Over all strings of a step and of plain decoding behind it; the bound is not vacuous."""
    largest = 0.0
    for seed in seeds:
        problem = random_problem(seed, max_trees=16)
        spent = mean_spent(problem.target, problem.draft, verifier_of(mode))
        distance = exact_step(problem.target, problem.draft, mode).total_variation(problem.target)
        assert distance <= spent + 1e-10, problem
        largest = max(largest, distance)
    assert largest > 0.02


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_mentored_keeps_every_token_within_its_divergence_on_random_trees(seed: int) -> None:
    """The conditional distribution of every accepted or added token, given the text before it, mixed over all trees."""
    problem = random_problem(seed, max_trees=16)
    done = exact_step(problem.target, problem.draft, "lossy_mentored:kl=0.1")
    size, length = problem.vocab_size, done.max_length
    strings = done.strings(problem.target, length)
    for depth in range(length):
        rows = strings.reshape(size**depth, size, -1).sum(2)
        for number, row in enumerate(rows):
            if float(row.sum()) > 1e-9:
                path = tuple(number // size**place % size for place in reversed(range(depth)))
                assert divergence(problem.target(path), row / row.sum()) <= 0.1 + 1e-8


def greedy_rows(tree: CandidateTree, logits: Callable[[tuple[int, ...]], torch.Tensor]) -> TargetRows:
    """Rows at temperature 0: one-hot probabilities, the logits of the model."""
    rows = [logits(tree.tokens_to(node)) for node in range(ROOT, len(tree))]
    return TargetRows(torch.stack(rows), tree, SamplingParams())


@pytest.mark.parametrize("mode", ["lossy_top_beta:beta=1", "lossy_top_beta:beta=5,tau=0", "lossy_mentored:kl=0.3"])
def test_at_temperature_zero_these_equal_greedy(mode: str) -> None:
    """One token at the top, no gap, or a bound that only rescales a certainty: the very verdicts of greedy decoding."""
    for seed in range(30):
        problem = random_problem(seed, max_trees=16)
        model = toy_model((seed, "positive"), problem.vocab_size, plain=True)
        for _, tree in enumerate_outcomes(problem.draft):
            rows = greedy_rows(tree, lambda path, model=model: model(path).log())
            expected = verify(tree, rows, "greedy", CounterRng(0, 0))
            assert [v for _, v in enumerate_outcomes(verifier_of(mode)(tree, rows))] == [expected]
            assert expected.spent_tv == 0.0


def test_top_beta_at_temperature_zero_accepts_the_second_likeliest_within_its_gap() -> None:
    """Logits 2.0, 1.5, -inf: the second is 0.5 behind; a masked token is never accepted; each costs 1."""
    logits = torch.tensor([2.0, 1.5, -torch.inf, 0.0], dtype=torch.float64)
    for mode, token, accepted in (
        ("lossy_top_beta:beta=2,tau=0.6", 1, 1),
        ("lossy_top_beta:beta=2,tau=0.4", 1, 0),
        ("lossy_top_beta:beta=4,tau=9", 2, 0),
        ("lossy_top_beta:beta=2,tau=9", 3, 0),
    ):
        tree = chain([token])
        verdict = verifier_of(mode)(tree, greedy_rows(tree, lambda path: logits))(CounterRng(0, 0))
        assert verdict.num_accepted == accepted, mode
        assert verdict.spent_tv == pytest.approx(float(accepted)), mode


@pytest.mark.parametrize("mode", RULE_MODES)
def test_a_token_that_the_target_excludes_is_never_written(mode: str) -> None:
    """A grammar mask holds in lossy modes as well: for samples, for cached tokens."""
    row = torch.tensor([0.0, 0.7, 0.3, 0.0], dtype=torch.float64)
    for draft in (
        sibling_samples([DRAFT_V4, DRAFT_V4], replacement=False),
        sibling_samples([DRAFT_V4], fixed=(0, 3), replacement=True, exclude_fixed=True),
        sibling_samples([], fixed=(0, 3), replacement=True),
    ):
        done = exact_step(always(row), draft, mode)
        assert not [prefix for prefix in done.prefixes if {0, 3} & set(prefix)]


def test_a_duplicate_of_a_cached_token_does_not_move_the_distribution() -> None:
    """A sampled token that is cached too is one node: the rule must not see which was sampled."""

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_fixed(ROOT, 3, "cache")
        builder.add_sampled(ROOT, rng.categorical(DRAFT_V4, ROOT, "sample"), Sampled(DRAFT_V4), "draft")
        return builder.build()

    distribution, _ = distribution_at_root(draft, "lossy_mentored:kl=0.2")
    assert torch.allclose(distribution, Mentored(0.2)(offer(TARGET_V4, DRAFT_V4)), rtol=0, atol=EXACT)


def test_a_lossless_request_never_imports_a_lossy_mode() -> None:
    """Nothing that could change an answer is even loaded, all the way from an engine's door to its last token."""
    script = """
import sys
from precedent.config import MODE_GROUP, MODES, SamplingParams, SpeculationConfig
from precedent.engine.checks import mode_of
from precedent.engine import Engine
from precedent.planning.costs import CostCurve
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

draft = tiny_causal_lm(num_hidden_layers=1)
engine = Engine(tiny_causal_lm(), byte_tokenizer(), name="tiny", draft_model=draft, cost=CostCurve())
greedy, sampled = SamplingParams(max_tokens=4), SamplingParams(temperature=1.0, max_tokens=4)
asked = [(greedy, "auto"), (sampled, "traversal"), (sampled, "topdown")]
asked.append((SamplingParams(temperature=1.0, seed=1, max_tokens=4), "coupled"))
for sampling, mode in asked:
    result = engine.submit([5, 6, 7, 5, 6], sampling, speculation=SpeculationConfig(mode=mode)).result()
    assert len(result.token_ids) > 0
lossless = [name for name in sys.modules if name.startswith("precedent_research")]
engine.submit([5, 6, 7, 5, 6], sampled, speculation=SpeculationConfig(mode="lossy_typical")).result()
print(lossless, "precedent_research.lossy" in sys.modules)
engine.close()
"""
    done = run(["-c", script])
    assert done.stdout.strip() == "[] True", done.stderr


def test_a_lossy_mode_says_so_and_how_much_it_spent() -> None:
    """Opt-in by name; the statistics carry the total variation, and every other mode spends nothing."""
    engine = make_engine(draft_model=tiny_causal_lm("llama", seed=22, num_hidden_layers=1))
    sampling = SamplingParams(temperature=1.0, max_tokens=30)
    lossy = SpeculationConfig(drafters=("draft-model",), mode="lossy_mentored:kl=0.5")
    spent = engine.submit(PROMPT, sampling, speculation=lossy).result().stats
    exact = engine.submit(PROMPT, sampling, query="order").result().stats
    assert spent.as_dict()["lossless"] is False
    assert float(spent.as_dict()["spent_total_variation"]) == pytest.approx(spent.spent_tv, abs=1e-6)
    assert exact.as_dict()["lossless"] is True
    assert exact.spent_tv == 0.0
    with pytest.raises(ConfigError, match="no parameter 'kk'"):
        engine.submit(PROMPT, sampling, speculation=SpeculationConfig(mode="lossy_mentored:kk=1"))
    engine.close()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("lossy_mentored:kl=-1", "kl=-1.0 must be 0"),
        ("lossy_mentored:kl=nan", "kl=nan must be 0"),
        ("lossy_mentored:kl=much", "kl=much is not a number"),
        ("lossy_mentored:lk=1", "no parameter 'lk'; known: kl"),
        ("lossy_mentored:kl", "write parameters as name=value"),
        ("lossy_typical:epsilon=0", r"epsilon=0.0 must lie in \(0, 1\]"),
        ("lossy_typical:delta=2", r"delta=2.0 must lie in \(0, 1\]"),
        ("lossy_top_beta:beta=0", "beta=0.0 must be a whole number"),
        ("lossy_top_beta:beta=1.5", "beta=1.5 must be a whole number"),
        ("lossy_top_beta:tau=-1", "tau=-1.0 must be 0 or more"),
        ("lossy_judge", "name an installed judge"),
        ("lossy_mentord:kl=0.1", "use one of .*lossy_mentored"),
        ("traversal:kl=0.1", r"mode='traversal:kl=0.1' cannot verify"),
    ],
)
def test_a_mode_that_says_nonsense_is_refused_in_one_line(mode: str, message: str) -> None:
    """At an engine's door, before any work starts."""
    with pytest.raises(ConfigError, match=message) as caught:
        mode_of(SpeculationConfig(mode=mode), SamplingParams(temperature=1.0))
    assert "\n" not in str(caught.value)


def test_lossy_modes_are_named_so() -> None:
    """Opting in takes the word."""
    assert all(name.startswith("lossy_") for name in installed(MODE_GROUP))
    assert all(verifier_of(name).lossy for name in RULES)
    assert not any(name.startswith("lossy_") for name in MODES)
