"""A learned judge may overrule a rejection, and says so; modes are found by name, nonsense is refused in one line."""

from __future__ import annotations

import pytest
import torch
from helpers.enumeration import exact_step, mean_spent, toy_rows
from helpers.judges import install_judges
from helpers.random_trees import always, random_problem, sibling_samples

from precedent.config import MODE_GROUP, MODES, SamplingParams, SpeculationConfig
from precedent.engine.checks import mode_of
from precedent.errors import ConfigError
from precedent.runtime.plugins import installed
from precedent.sampling.rng import CounterRng
from precedent.tree import CandidateTree, chain
from precedent.verify import Verdict, verifier_of
from precedent_research.judge import overruled_by
from precedent_research.lossy import RULES

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)
EXACT = 1e-12


def never(tree: CandidateTree, rows: object, node: int) -> float:
    """A judge that overrules no rejection."""
    return 0.0


def sometimes(tree: CandidateTree, rows: object, node: int) -> float:
    """A judge whose mind depends on the path alone."""
    return (0.0, 0.25, 0.5, 1.0)[sum(tree.tokens_to(node)) % 4]


EXHAUSTIVE = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(20_000, 20_600)]


@pytest.mark.parametrize("seed", [*range(1000, 1020), *EXHAUSTIVE])
def test_a_judge_spends_at_least_the_total_variation_it_causes(seed: int) -> None:
    """Random trees; the judge that never overrules is lossless and free."""
    problem = random_problem(seed, max_trees=16)
    assert exact_step(problem.target, problem.draft, overruled_by(never)).total_variation(problem.target) < EXACT
    assert mean_spent(problem.target, problem.draft, overruled_by(never)) == 0.0
    distance = exact_step(problem.target, problem.draft, overruled_by(sometimes)).total_variation(problem.target)
    assert distance <= mean_spent(problem.target, problem.draft, overruled_by(sometimes)) + 1e-10


def test_a_judge_at_one_sample_spends_exactly_the_total_variation() -> None:
    """Accepted mass min(p, q) + (q - p)+ times the judge's chance; the rest is recovered as always."""
    draft = sibling_samples([DRAFT_V4], replacement=True)
    done = exact_step(always(TARGET_V4), draft, overruled_by(sometimes))
    distance = done.total_variation(always(TARGET_V4))
    expected = float(((DRAFT_V4 - TARGET_V4).clamp(min=0) * torch.tensor([0.0, 0.25, 0.5, 1.0])).sum())
    assert distance == pytest.approx(expected, abs=EXACT)
    assert mean_spent(always(TARGET_V4), draft, overruled_by(sometimes)) == pytest.approx(expected, abs=EXACT)
    assert done.expected_accepted == pytest.approx(0.55 + expected, abs=EXACT)


def test_verification_goes_on_below_a_token_that_a_judge_accepted() -> None:
    """The rejected token's own children are proposals like any other."""
    tree = chain([0, 1])
    row = torch.tensor([0.0, 1.0], dtype=torch.float64)
    verdict = overruled_by(lambda *_: 1.0)(tree, toy_rows(always(row), tree))(CounterRng(0, 0))
    assert verdict == Verdict((0, 1), 1, "bonus", 1.0)


def test_an_installed_judge_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry-point group `precedent.judges`."""
    install_judges(monkeypatch, mine=lambda *_: 1.0)
    tree = chain([0])
    rows = toy_rows(always(torch.tensor([0.0, 1.0])), tree)
    assert verifier_of("lossy_judge:name=mine")(tree, rows)(CounterRng(0, 0)).path == (0,)
    with pytest.raises(ConfigError, match=r"no judge is called 'yours' \(installed: mine\)"):
        verifier_of("lossy_judge:name=yours")


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
