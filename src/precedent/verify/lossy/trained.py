"""A trained judge: a logistic regression on `features`, which overrules where a change of the outcome is unlikely."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from precedent.errors import ConfigError, ModelLoadError
from precedent.sampling.target_rows import TargetRows
from precedent.tree import CandidateTree, Sampled
from precedent.verify.lossy.features import HIDDEN, Rejected, check_features, features_of, widths_of

JUDGE_FILE = "judge.json"

FORMAT = 1
"""Increase it whenever an older version of this file could not read the judge."""


@dataclass(frozen=True, slots=True)
class TrainedJudge:
    """Overrules a rejection if the probability that the token changes the outcome lies below `threshold`.

    That probability is the logistic function of `intercept + weights . features`, with as many weights for a feature as
    it has numbers. Only tokens that carry the draft model's logits are judged; all others (from a cache, a prompt, a
    block draft) stay rejected, and so does a token without a row if the judge reads hidden states. Raises ConfigError
    for weights that do not fit the features, unknown features, or a threshold outside [0, 1].
    """

    features: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float
    threshold: float
    target: str = ""
    draft: str = ""
    outcome: str = ""

    def __post_init__(self) -> None:
        check_features(self.features)
        widths_of(self.features, len(self.weights))
        if not all(map(math.isfinite, (*self.weights, self.intercept))):
            raise ConfigError("a judge's numbers must be finite")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold={self.threshold} must lie between 0 (never overrule) and 1")

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the target has to keep hidden states for this judge."""
        return HIDDEN in self.features

    @property
    def hidden_size(self) -> int | None:
        """The size of the hidden states that the judge reads; None if it reads none."""
        widths = dict(zip(self.features, widths_of(self.features, len(self.weights)), strict=True))
        return widths.get(HIDDEN)

    def __call__(self, tree: CandidateTree, rows: TargetRows, node: int) -> float:
        """1 if the rejection of `node` is overruled, else 0."""
        draft_logits = draft_logits_of(tree, node)
        if draft_logits is None or (self.reads_hidden_states and node >= tree.num_scored):
            return 0.0
        hidden = rows.hidden(node) if self.reads_hidden_states else None
        rejected = Rejected(tree.token_ids[node], rows.logits(tree.parents[node]), draft_logits, hidden)
        return float(self.probability(features_of(rejected, self.features)) < self.threshold)

    def probability(self, values: Sequence[float]) -> float:
        """The probability that a token with these features changes the outcome."""
        score = self.intercept + sum(value * weight for value, weight in zip(values, self.weights, strict=True))
        return 1.0 / (1.0 + math.exp(-min(max(score, -500.0), 500.0)))

    def at(self, threshold: float) -> Self:
        """The same judge with another threshold."""
        return dataclasses.replace(self, threshold=threshold)

    def save(self, folder: Path) -> None:
        """Write the judge as JSON into a folder, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{JUDGE_FILE}.partial"
        written = {"format": FORMAT, **dataclasses.asdict(self)}
        partial.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / JUDGE_FILE)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a judge from its folder. Raises ModelLoadError if there is none, or if it cannot be read."""
        path = folder / JUDGE_FILE
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ModelLoadError(f"{path} was written by another version of Precedent: train the judge again")
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in found.items()
            }
            return cls(**fields)
        except OSError as error:
            raise ModelLoadError(f"there is no judge in {folder}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ModelLoadError(f"{path} is not a judge ({error}): train it again") from error


def draft_logits_of(tree: CandidateTree, node: int) -> Tensor | None:
    """The draft model's logits behind the first sample of `node`, None if nobody kept any."""
    for each in tree.candidates_at[tree.parents[node]]:
        if each.child == node and isinstance(each.distribution, Sampled) and each.distribution.logits is not None:
            return each.distribution.logits
    return None
