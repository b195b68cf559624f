"""A trained judge: its features by hand, the distribution that it writes, and where it may be used."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.enumeration import exact_step, mean_spent, toy_rows
from helpers.judges import install_judges
from helpers.random_trees import always, random_distribution

from precedent.config import SamplingParams
from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.sampling.rng import CounterRng, Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder, chain
from precedent.verify import verifier_of
from precedent_research.judge import (
    FEATURES,
    JUDGE_FILE,
    OF_ROWS,
    Rejected,
    TrainedJudge,
    draft_logits_of,
    features_of,
    overruled_by,
)
from precedent_testing.replay_rng import enumerate_outcomes

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)
EXACT = 1e-12


def judge_with(threshold: float, **weights: float) -> TrainedJudge:
    """A judge with these weights, and intercept 0."""
    return TrainedJudge(tuple(weights), tuple(weights.values()), 0.0, threshold)


def sampled(row: torch.Tensor, depth: int = 1, logits: bool = True) -> Any:
    """A chain of samples from one row, as a draft model leaves it for a judge."""

    def draft(rng: Rng) -> CandidateTree:
        builder, node = TreeBuilder(), ROOT
        for _ in range(depth):
            token = rng.categorical(row, node, "sample")
            node = builder.add_sampled(node, token, Sampled(row, logits=row.log() if logits else None), "draft")
        return builder.build()

    return draft


def test_features_by_hand() -> None:
    """Token 1 of the rows above; logits may be shifted by any constant."""
    seen = Rejected(1, TARGET_V4.log() + 3.0, DRAFT_V4.log() - 1.0, torch.tensor([0.5, -2.0]))
    entropy = -sum(p * math.log(p) for p in TARGET_V4.tolist())
    divergence = sum(p * math.log(p / q) for p, q in zip(TARGET_V4.tolist(), DRAFT_V4.tolist(), strict=True))
    expected = {
        "log_prob": math.log(0.2),
        "margin": math.log(0.4 / 0.2),
        "rank": math.log1p(2),
        "entropy": entropy,
        "draft_log_prob": math.log(0.3),
        "draft_entropy": -sum(q * math.log(q) for q in DRAFT_V4.tolist()),
        "divergence": divergence,
    }
    assert tuple(expected) == OF_ROWS
    assert features_of(seen, OF_ROWS) == pytest.approx(list(expected.values()), abs=1e-6)
    assert features_of(seen, ("hidden", "margin")) == pytest.approx([0.5, -2.0, math.log(2)], abs=1e-6)
    assert set(FEATURES) == {*OF_ROWS, "hidden"}


def test_excluded_tokens_leave_every_feature_finite() -> None:
    """A restricted head of the draft, a grammar on the target."""
    target, draft = TARGET_V4.log().clone(), DRAFT_V4.log().clone()
    target[0], draft[3] = -torch.inf, -torch.inf
    assert all(map(math.isfinite, features_of(Rejected(0, target, draft), OF_ROWS)))


def test_the_probability_is_the_logistic_function_of_the_features() -> None:
    judge = TrainedJudge(("margin", "rank"), (3.0, -1.0), 0.25, 0.5)
    score = 0.25 + 3.0 * 4.0 - 2.5
    assert judge.probability([4.0, 2.5]) == pytest.approx(1 / (1 + math.exp(-score)), abs=EXACT)
    assert judge_with(0.5, margin=-1e6).probability([1.0]) == pytest.approx(0.0, abs=1e-200)


@pytest.mark.parametrize("seed", range(12))
def test_the_written_distribution_of_a_trained_judge(seed: int) -> None:
    """By enumeration: min(p, q) and, of what is rejected, all that the judge overrules; the rest is recovered."""
    source = random.Random(seed)
    target, row = (random_distribution(source, 5, plain=True) for _ in range(2))
    judge = judge_with(source.choice([0.3, 0.5, 0.7]), margin=source.gauss(0, 1), divergence=source.gauss(0, 1))
    overruled = torch.tensor(
        [
            judge.probability(features_of(Rejected(token, target.log(), row.log()), judge.features)) < judge.threshold
            for token in range(5)
        ],
        dtype=torch.float64,
    )
    rejected, missing = (row - target).clamp(min=0), (target - row).clamp(min=0)
    left = (rejected * (1 - overruled)).sum()
    expected = torch.minimum(target, row) + rejected * overruled + missing / missing.sum() * left
    done = exact_step(always(target), sampled(row), overruled_by(judge))
    written = done.strings(always(target), 2).reshape(5, 5).sum(1)
    assert torch.allclose(written, expected, rtol=0, atol=EXACT)
    spent = mean_spent(always(target), sampled(row), overruled_by(judge))
    assert spent == pytest.approx(0.5 * float((written - target).abs().sum()), abs=EXACT)


def test_a_trained_judge_spends_at_least_what_it_changes_on_a_chain() -> None:
    """Two samples deep, over all strings; threshold 0 is lossless, threshold 1 accepts every sample."""
    for threshold, accepted in ((0.0, None), (0.6, None), (1.0, 2.0)):
        verifier = overruled_by(judge_with(threshold, margin=0.5))
        done = exact_step(always(TARGET_V4), sampled(DRAFT_V4, 2), verifier)
        spent = mean_spent(always(TARGET_V4), sampled(DRAFT_V4, 2), verifier)
        assert done.total_variation(always(TARGET_V4)) <= spent + EXACT
        assert (spent == 0.0) == (threshold == 0.0)
        assert accepted is None or done.expected_accepted == pytest.approx(accepted)


def test_only_tokens_with_the_drafts_logits_are_judged() -> None:
    """A cached token, or a sample whose drafter kept nothing, stays rejected."""
    always_overruling = overruled_by(judge_with(1.0, margin=0.0))
    for draft in (lambda rng: chain([0]), sampled(DRAFT_V4, logits=False)):
        done = exact_step(always(TARGET_V4), draft, always_overruling)
        assert done.total_variation(always(TARGET_V4)) < EXACT
    tree = sampled(DRAFT_V4)(CounterRng(0, 0))
    assert draft_logits_of(tree, 0) is tree.candidates[0].distribution.logits
    assert draft_logits_of(chain([0]), 0) is None


def hidden_judge() -> TrainedJudge:
    """Overrules where the first number of the hidden state is negative."""
    return TrainedJudge(("hidden", "margin"), (1.0, 0.0, 0.0), 0.0, 0.5)


def test_a_judge_may_read_hidden_states() -> None:
    """Of the rejected token itself; without any the target says so."""
    judge, tree = hidden_judge(), sampled(DRAFT_V4)(CounterRng(0, 0))
    assert judge.reads_hidden_states
    assert not judge_with(0.5, margin=1.0).reads_hidden_states
    row = TARGET_V4.log().expand(2, 4)
    for first, expected in ((-1.0, 1.0), (1.0, 0.0)):
        states = {0: torch.tensor([first, 7.0])}
        rows = TargetRows(row, tree, SamplingParams(temperature=1.0), hidden=states.__getitem__)
        assert judge(tree, rows, 0) == expected
    with pytest.raises(UnsupportedError, match="keeps no hidden states"):
        judge(tree, toy_rows(always(TARGET_V4), tree), 0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed judges: one that was trained, one that was written."""
    install_judges(monkeypatch, trained=judge_with(0.25, margin=0.0), written=lambda *_: 1.0)


@pytest.mark.usefixtures("installed")
def test_a_mode_may_give_a_trained_judge_another_threshold() -> None:
    """Its probability is 0.5 here; a judge that was not trained has no threshold."""
    trees = [sampled(DRAFT_V4)(CounterRng(seed, 0)) for seed in range(16)]
    for mode, spent in (("lossy_judge:name=trained", 0.0), ("lossy_judge:name=trained,threshold=0.75", 1.0)):
        decisions = [verifier_of(mode)(tree, toy_rows(always(TARGET_V4), tree)) for tree in trees]
        assert max(verdict.spent_tv for each in decisions for _, verdict in enumerate_outcomes(each)) == spent
        assert verifier_of(mode) is verifier_of(mode)  # read once
    for mode, message in (
        ("lossy_judge:name=trained,threshold=2", "threshold=2.0 must lie between 0"),
        ("lossy_judge:name=trained,threshold=low", "threshold=low is not a number"),
        ("lossy_judge:name=trained,height=1", "name an installed judge"),
        ("lossy_judge:name=written,threshold=0.5", "only a judge of `precedent train-judge` has a threshold"),
    ):
        with pytest.raises(ConfigError, match=message):
            verifier_of(mode)


def test_a_judge_is_read_as_it_was_written(tmp_path: Path) -> None:
    """JSON that anybody can read; what is damaged or of another version is refused, with what to do."""
    judge = replace(hidden_judge(), target="a target", draft="a draft", outcome="orders")
    judge.save(tmp_path)
    assert TrainedJudge.load(tmp_path) == judge
    found = json.loads((tmp_path / JUDGE_FILE).read_text())
    assert found["features"] == ["hidden", "margin"]
    for change, message in (
        ({"format": 2}, "written by another version"),
        ({"weights": [1.0]}, "is not a judge"),
        ({"intercept": math.nan}, "a judge's numbers must be finite"),
        ({"features": ["hidden", "colour"]}, "is not a judge"),
        ({"colour": "red"}, "is not a judge"),
    ):
        (tmp_path / JUDGE_FILE).write_text(json.dumps(found | change))
        with pytest.raises(ModelLoadError, match=message):
            TrainedJudge.load(tmp_path)
    (tmp_path / JUDGE_FILE).write_text("[")
    with pytest.raises(ModelLoadError, match="is not a judge"):
        TrainedJudge.load(tmp_path)
    with pytest.raises(ModelLoadError, match="there is no judge in"):
        TrainedJudge.load(tmp_path / "nowhere")
