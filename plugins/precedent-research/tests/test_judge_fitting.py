"""What a judge learns from labels: the regression, its threshold and the area under the curve, against scikit-learn."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from precedent.errors import ConfigError, UnsupportedError
from precedent_research.judge_training.fitting import (
    STRENGTHS,
    Examples,
    area_under_curve,
    cross_validated,
    fit,
    interval_of_area,
    threshold_of,
)
from precedent_research.judge_training.judge_training import JudgeRecipe


def examples(number: int = 120, width: int = 3, seed: int = 0) -> Examples:
    """Labels that follow the first feature, with noise; twelve tasks; the last feature is constant."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(number, width)) * [3.0, 1.0, 0.0][:width] + [5.0, 0.0, 2.0][:width]
    labels = (rng.random(number) < 1 / (1 + np.exp(5.0 - features[:, 0]))).astype(np.int64)
    return Examples(features, labels, np.arange(number) % 12)


@pytest.mark.parametrize("seed", range(8))
def test_the_area_is_that_of_scikit_learn(seed: int) -> None:
    """With many ties, few of them, and none."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=40)
    labels[:2] = 0, 1
    for scores in (rng.normal(size=40), rng.integers(5, size=40).astype(float), np.zeros(40)):
        assert area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_the_area_of_one_kind_of_label_is_unknown() -> None:
    assert math.isnan(area_under_curve(np.zeros(3), np.ones(3, dtype=np.int64)))


def test_the_fit_is_where_the_penalised_likelihood_is_flat() -> None:
    """Sum of log losses plus |weights|^2 / (2 strength), over standardised features; a constant one gets no weight."""
    known, strength = examples(), 0.3
    fitted = fit(known, strength)
    scaled = (known.features - fitted.means) / fitted.scales
    assert np.allclose(scaled[:, :2].mean(0), 0.0, atol=1e-9)
    assert np.allclose(scaled[:, :2].std(0), 1.0, atol=1e-9)
    errors = fitted.probabilities(known.features) - known.labels
    assert np.allclose(scaled.T @ errors + np.array(fitted.weights) / strength, 0.0, atol=1e-3)
    assert errors.sum() == pytest.approx(0.0, abs=1e-3)
    assert fitted.weights[2] == 0.0
    weights, intercept = fitted.folded()
    scores = known.features @ np.array(weights) + intercept
    assert np.allclose(1 / (1 + np.exp(-scores)), fitted.probabilities(known.features), atol=1e-5)
    assert area_under_curve(fitted.probabilities(known.features), known.labels) > 0.8


def test_no_example_is_scored_by_a_fit_that_has_seen_its_task() -> None:
    """If every task has labels of its own, unseen tasks are scored by chance; seen ones would not be."""
    rng = np.random.default_rng(3)
    tasks = np.repeat(np.arange(30), 4)
    known = Examples(np.eye(30)[tasks], rng.integers(2, size=30)[tasks].astype(np.int64), tasks)
    fitted = fit(known, 1.0)
    assert area_under_curve(fitted.probabilities(known.features), known.labels) == 1.0
    assert cross_validated(known, 1.0).area == pytest.approx(0.5, abs=0.05)


def test_the_strength_with_the_largest_area_is_taken() -> None:
    known = examples(60, 2, seed=1)
    areas = {strength: cross_validated(known, strength).area for strength in STRENGTHS}
    best = cross_validated(known, None)
    assert best.area == max(areas.values())
    assert areas[best.strength] == best.area


@pytest.mark.parametrize(("keep", "lost"), [(1.0, 0), (0.9, 1), (0.75, 2), (0.5, 5)])
def test_the_threshold_leaves_the_wanted_share_rejected_and_no_more(keep: float, lost: int) -> None:
    """Of ten examples that change the outcome, at most `lost` lie below it; a higher one would lose another."""
    rng = np.random.default_rng(4)
    probabilities, labels = rng.random(30), np.array([1] * 10 + [0] * 20)
    threshold = threshold_of(probabilities, labels, keep)
    below = (probabilities[:10] < threshold).sum()
    assert below == lost
    assert (probabilities[:10] <= threshold).sum() == lost + 1


def test_the_interval_of_the_area_narrows_with_the_number_of_tasks() -> None:
    """It holds the area, and resampling is repeatable."""
    widths = []
    for number in (60, 600):
        known = examples(number)
        low, high = interval_of_area(known.features[:, 0], known, 0)
        assert (low, high) == interval_of_area(known.features[:, 0], known, 0)
        assert low < area_under_curve(known.features[:, 0], known.labels) < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_both_labels_must_occur_in_two_tasks() -> None:
    known = examples(6)
    for label, meaning in ((1, "leave the outcome as it is occur in 1"), (0, "change the outcome occur in 1")):
        labels = np.full(6, label)
        labels[3] = 1 - label
        with pytest.raises(ConfigError, match=f"mismatches that {meaning} of the tasks"):
            Examples(known.features, labels, known.tasks).check()


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'precedent-llm\[research\]'"):
        fit(examples(), 1.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"features": ()}, "must be distinct names of log_prob, .*hidden"),
        ({"features": ("margin", "margin")}, "must be distinct names"),
        ({"features": ("colour",)}, "features=colour must be"),
        ({"mismatches": 9}, "mismatches=9 must be at least 10"),
        ({"strength": 0.0}, "strength=0.0 must be above 0"),
        ({"held_out": 1.0}, "held_out=1.0 must lie between 0 and 1"),
        ({"keep": math.nan}, "keep=nan must be above 0 and at most 1"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeRecipe(**setting)  # type: ignore[arg-type]
