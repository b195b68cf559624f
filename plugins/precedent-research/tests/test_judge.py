"""Judges: what they overrule is spent; features by hand, the written distribution, and engines that have one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.enumeration import exact_step, mean_spent, toy_rows
from helpers.random_trees import DRAFT_V4, TARGET_V4, always, random_distribution, random_problem, sibling_samples
from helpers.tiny_draft import tiny_target

from precedent import verify
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, ModelLoadError
from precedent.planning.costs import CostCurve
from precedent.sampling.rng import CounterRng, Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder, chain
from precedent.verify import Verdict, verifier_of
from precedent_drafts.fingerprints import name_of
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
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

EXACT = 1e-12

HIDDEN_JUDGE = TrainedJudge(("hidden", "margin"), (1.0, 0.0, 0.0), 0.0, 0.5)
"""Overrules where the first number of the hidden state is negative."""


def install_judges(monkeypatch: pytest.MonkeyPatch, **judges: Any) -> None:
    """Install these judges by name, and no others, as packages do under the entry-point group `precedent.judges`."""
    verify._installed_verifier.cache_clear()  # or a mode keeps the judge that it had in another test
    found = {name: lambda judge=judge: judge for name, judge in judges.items()}
    monkeypatch.setattr("precedent_research.judge.load_plugin", lambda group, name: found.get(name))
    monkeypatch.setattr("precedent_research.judge.installed", lambda group: sorted(judges))


# What a judge spends


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


# Trained judges


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


def test_a_mode_may_give_a_trained_judge_another_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probability is 0.5 here; a judge that was not trained has no threshold."""
    install_judges(monkeypatch, trained=judge_with(0.25, margin=0.0), written=lambda *_: 1.0)
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
    judge = replace(HIDDEN_JUDGE, target="a target", draft="a draft", outcome="orders")
    judge.save(tmp_path)
    assert TrainedJudge.load(tmp_path) == judge
    found = json.loads((tmp_path / JUDGE_FILE).read_text())
    assert found["features"] == ["hidden", "margin"]
    for change, message in (
        ({"format": 2}, "has format 2, this version reads 1"),
        ({"weights": [1.0]}, "cannot be read"),
        ({"intercept": math.nan}, "a judge's numbers must be finite"),
        ({"features": ["hidden", "colour"]}, "cannot be read"),
        ({"colour": "red"}, "cannot be read"),
    ):
        (tmp_path / JUDGE_FILE).write_text(json.dumps(found | change))
        with pytest.raises(ModelLoadError, match=message):
            TrainedJudge.load(tmp_path)
    (tmp_path / JUDGE_FILE).write_text("[")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        TrainedJudge.load(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        TrainedJudge.load(tmp_path / "nowhere")


# Engines

TOKENIZER, PROMPT = byte_tokenizer(), tuple(range(40, 60))
MODE = "lossy_judge:name=watching"


class Watching:
    """Overrules every other rejection, and keeps what it was shown."""

    def __init__(self, reads_hidden_states: bool = False) -> None:
        self.reads_hidden_states, self.seen = reads_hidden_states, list[dict[str, Any]]()

    def __call__(self, tree: CandidateTree, rows: TargetRows, node: int) -> float:
        self.seen.append(
            {
                "path": tree.tokens_to(node),
                "row": rows.logits(tree.parents[node]).clone(),
                "draft": draft_logits_of(tree, node),
                "hidden": rows.hidden(node).clone() if self.reads_hidden_states else None,
            }
        )
        return float(len(self.seen) % 2)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Install a judge under the name `watching`."""

    def installed(judge: Any) -> Any:
        install_judges(monkeypatch, watching=judge)
        return judge

    return installed


def engine_of(mode: str, **settings: Any) -> Engine:
    """Target and draft model; the draft disagrees nearly everywhere."""
    speculation = SpeculationConfig(drafters=("draft-model",), mode=mode, max_draws=3)
    options = EngineOptions(draft_model=tiny_draft(), speculation=speculation)
    return Engine(tiny_target(), TOKENIZER, options, name="tiny", cost=CostCurve(), **settings)


def tiny_draft() -> Any:
    return tiny_causal_lm(hidden_size=32, num_hidden_layers=1, seed=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_judge_sees_both_models_rows_and_the_targets_hidden_state(install: Any, temperature: float) -> None:
    """Against transformers, behind the answer so far, both under the bias that keeps an answer from ending early."""
    judge = install(Watching(reads_hidden_states=True))
    endless = dict.fromkeys(TOKENIZER.all_special_ids, -100.0)
    sampling = SamplingParams(temperature=temperature, max_tokens=16, logit_bias=endless)
    with closing(engine_of(MODE)) as engine:
        result = engine.submit(PROMPT, sampling).result()
    assert len(result.token_ids) == 16
    assert result.stats.spent_tv >= 1.0
    assert len(judge.seen) > 3
    target, draft, checked = tiny_target(), tiny_draft(), 0
    for seen in judge.seen:
        for end in range(len(result.token_ids) + 1):
            ids = torch.tensor([[*PROMPT, *result.token_ids[:end], *seen["path"]]])
            with torch.no_grad():
                found, drafted = target(ids, output_hidden_states=True), draft(ids)
            if torch.allclose(found.hidden_states[-1][0, -1], seen["hidden"], atol=1e-9):
                for logits, shown in ((found.logits, seen["row"]), (drafted.logits, seen["draft"])):
                    row = logits[0, -2]
                    row[list(endless)] -= 100.0
                    torch.testing.assert_close(row, shown)
                checked += 1
                break
    assert checked == len(judge.seen)


def test_hidden_states_are_kept_for_those_who_read_them_alone(install: Any) -> None:
    """A judge that does not read them, and a lossless engine, keep none; a request cannot ask for them afterwards."""
    install(Watching())
    for mode in (MODE, "auto"):
        with closing(engine_of(mode)) as engine:
            assert engine.target.runner.hidden is None
    install(Watching(reads_hidden_states=True))
    with closing(engine_of("auto")) as engine:
        asked = SpeculationConfig(mode=MODE)
        with pytest.raises(ConfigError, match="hidden states, which are kept from the engine's start"):
            engine.submit(PROMPT, SamplingParams(), speculation=asked)


def test_a_judge_of_another_model_is_refused_or_said(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By the size of the hidden states, at the engine's start and by request; another name is a warning."""
    install(Watching(reads_hidden_states=True))
    with closing(engine_of(MODE)) as engine:
        install(TrainedJudge(("margin", "hidden"), (0.0,) * 6, 0.0, 0.5))
        with pytest.raises(
            ConfigError, match="trained on hidden states of 5 numbers, and this target's have 32: train"
        ):
            engine.submit(PROMPT, SamplingParams(), speculation=SpeculationConfig(mode=MODE))
    with pytest.raises(ConfigError, match="hidden states of 5 numbers"):
        engine_of(MODE)
    for name, warned in (("another", True), (name_of(tiny_target()), False), ("", False)):
        install(TrainedJudge(("margin",), (0.0,), 0.0, 0.5, target=name))
        caplog.clear()
        engine_of(MODE).close()
        assert ("of this mode was trained for another" in caplog.text) == warned


def test_drafters_keep_their_logits_for_a_judge_alone(install: Any) -> None:
    """A step of any other mode holds no more than it did."""
    install(Watching())
    for mode, kept in ((MODE, True), ("lossy_typical", False), ("auto", False)):
        trees = list[CandidateTree]()
        with closing(engine_of(mode)) as engine:
            engine.watch_steps(lambda verified, token_ids, trees=trees: trees.append(verified.rows.tree))
            engine.submit(PROMPT, SamplingParams(temperature=1.0, max_tokens=8)).result()
        assert trees
        logits = [getattr(each.distribution, "logits", None) for tree in trees for each in tree.candidates]
        assert all((each is not None) == kept for each in logits), mode
