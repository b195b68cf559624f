"""Learns from labelled mismatches: a logistic regression, its threshold, and how well it ranks unseen ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from precedent.errors import ConfigError

STRENGTHS = (1.0, 0.1, 0.01, 0.001, 0.0001)
MOST_FOLDS = 5
RESAMPLES = 1000
DIGITS = 7
FEWEST_OF_A_KIND = 2

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Labelled mismatches: features `[n, num_features]`, labels `[n]` (1: the outcome changed), tasks `[n]`."""

    features: Numbers
    labels: NDArray[np.int64]
    tasks: NDArray[np.int64]

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Examples:
        """Only some of them."""
        return Examples(self.features[chosen], self.labels[chosen], self.tasks[chosen])

    def columns(self, chosen: Sequence[int]) -> Examples:
        """Only some of their features."""
        return Examples(self.features[:, list(chosen)], self.labels, self.tasks)

    def check(self) -> None:
        """Raise ConfigError unless both labels occur, each in at least two tasks."""
        for label, meaning in ((1, "change the outcome"), (0, "leave the outcome as it is")):
            found = len(set(self.tasks[self.labels == label].tolist()))
            if found < FEWEST_OF_A_KIND:
                raise ConfigError(
                    f"mismatches that {meaning} occur in {found} of the tasks to learn from, and two are needed: "
                    "label more mismatches, or of more runs"
                )


def fit(examples: Examples, strength: float) -> Any:
    """A logistic regression on standardised features, with an L2 penalty of 1 / `strength`."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=10_000, tol=1e-8))
    return model.fit(examples.features, examples.labels)


def probabilities_of(fitted: Any, features: Numbers) -> Numbers:
    """The probability of each row that the outcome changes, `[n]`."""
    found: Numbers = fitted.predict_proba(features)[:, 1]
    return found


def folded(fitted: Any) -> tuple[tuple[float, ...], float]:
    """Weights and intercept for features as they are, to `DIGITS` digits."""
    scaler, regression = fitted[0], fitted[1]
    scaled = regression.coef_[0] / scaler.scale_
    intercept = float(regression.intercept_[0] - scaled @ scaler.mean_)
    return tuple(_rounded(weight) for weight in scaled.tolist()), _rounded(intercept)


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


@dataclass(frozen=True, slots=True, eq=False)
class CrossValidated:
    """Each example's probability from a fit that has not seen its task `[n]`, and the mean area of the folds."""

    strength: float
    probabilities: Numbers
    area: float


def cross_validated(examples: Examples, strength: float | None) -> CrossValidated:
    """Cross-validate with a strength, by default the one of `STRENGTHS` with the largest area; ties take the first."""
    tried = [_cross_validated(examples, each) for each in (STRENGTHS if strength is None else (strength,))]
    return max(tried, key=lambda each: -1.0 if math.isnan(each.area) else each.area)


def _cross_validated(examples: Examples, strength: float) -> CrossValidated:
    """Areas are averaged over folds: the intercepts of different fits make their probabilities incomparable."""
    folds = GroupKFold(min(MOST_FOLDS, len(set(examples.tasks.tolist()))))
    found, areas = np.empty(len(examples.labels)), []
    for learned, left in folds.split(examples.features, examples.labels, examples.tasks):
        found[left] = _constant_or_fit(examples.where(learned), strength, examples.features[left])
        areas.append(area_under_curve(found[left], examples.labels[left]))
    known = [area for area in areas if not math.isnan(area)]
    return CrossValidated(strength, found, sum(known) / len(known) if known else math.nan)


def _constant_or_fit(known: Examples, strength: float, features: Numbers) -> Numbers:
    if len(set(known.labels.tolist())) == 1:  # a fold may leave one kind of label only
        return np.full(len(features), float(known.labels[0]))
    return probabilities_of(fit(known, strength), features)


def threshold_of(probabilities: Numbers, labels: NDArray[np.int64], keep: float) -> float:
    """The highest threshold that leaves rejected at least a share `keep` of the examples that change the outcome.

    Those below it are overruled.
    """
    important = np.sort(probabilities[labels == 1])
    lost = math.floor((1.0 - keep) * len(important) + 1e-9)
    return float(important[lost])


def area_under_curve(scores: Numbers, labels: NDArray[np.int64]) -> float:
    """The probability that an example that changes the outcome scores above one that does not; ties count half.

    NaN unless both kinds occur.
    """
    return float(roc_auc_score(labels, scores)) if len(set(labels.tolist())) == 2 else math.nan


def interval_of_area(scores: Numbers, examples: Examples, seed: int) -> tuple[float, float]:
    """The 95 % interval of the area, by resampling tasks."""
    rng = np.random.default_rng(seed)
    places = [np.flatnonzero(examples.tasks == task) for task in sorted(set(examples.tasks.tolist()))]
    areas = []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([places[task] for task in rng.integers(len(places), size=len(places))])
        areas.append(area_under_curve(scores[drawn], examples.labels[drawn]))
    low, high = np.nanquantile(areas, [0.025, 0.975])
    return float(low), float(high)
