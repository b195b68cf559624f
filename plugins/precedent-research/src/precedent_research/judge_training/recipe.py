"""How to train a judge, and what has been labelled so far, which lies in its folder until it ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from precedent.config import check_fields
from precedent.errors import ModelLoadError
from precedent_drafts.files import save_json
from precedent_research.judge import OF_ROWS, check_features, widths_of
from precedent_research.judge_training.mismatches import Mismatch

OF_LEARNING = frozenset({"features", "strength", "held_out", "keep"})
"""Settings of a recipe that labels do not depend on."""


@dataclass(frozen=True, slots=True)
class JudgeRecipe:
    """How to train a judge.

    About `mismatches` are labelled, as many in each run. Learning reads the `features`, with weights held back by an L2
    penalty of 1 / `strength` (None: what cross-validation finds best). A share `held_out` of the tasks is kept for the
    report. The threshold leaves rejected a share `keep` of the mismatches that change the outcome. Raises ConfigError
    if a value is out of range.
    """

    features: tuple[str, ...] = OF_ROWS
    mismatches: int = 300
    strength: float | None = None
    held_out: float = 0.25
    keep: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        check_features(self.features)
        checks = (
            ("mismatches", self.mismatches >= 10, "must be at least 10"),
            ("strength", self.strength is None or self.strength > 0.0, "must be above 0"),
            ("held_out", 0.0 < self.held_out < 1.0, "must lie between 0 and 1"),
            ("keep", 0.0 < self.keep <= 1.0, "must be above 0 and at most 1"),
        )
        check_fields(self, checks)

    def per_run(self, num_runs: int) -> int:
        """The most mismatches to label in each of so many runs."""
        return -(-self.mismatches // num_runs)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A mismatch, and whether the draft's token changed the outcome of its run."""

    mismatch: Mismatch
    changed: bool

    def with_features(self, names: Sequence[str], wanted: Sequence[str]) -> Labelled:
        """The same label with some of the features that are there."""
        values = iter(self.mismatch.features)
        of_name = {
            name: tuple(islice(values, width))
            for name, width in zip(names, widths_of(names, len(self.mismatch.features)), strict=True)
        }
        features = tuple(value for name in wanted for value in of_name[name])
        return Labelled(dataclasses.replace(self.mismatch, features=features), self.changed)


@dataclass(frozen=True, slots=True)
class Piece:
    """The labels of one run: its task, how many tokens and mismatches it has, and the seconds that it took.

    A run that `failed` has no labels.
    """

    task: str
    failed: bool
    tokens: int
    mismatches: int
    seconds: float
    labels: tuple[Labelled, ...]

    def with_features(self, names: Sequence[str], wanted: Sequence[str]) -> Piece:
        """The same labels with some of the features that are there."""
        return dataclasses.replace(self, labels=tuple(each.with_features(names, wanted) for each in self.labels))

    def save(self, path: Path) -> None:
        """Write the piece atomically."""
        save_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a piece. Raises ModelLoadError if the file is damaged."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "labels": tuple(_labelled(each) for each in found["labels"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{path} is damaged ({error}); delete it, and --resume labels it again") from error


def _labelled(found: dict[str, Any]) -> Labelled:
    mismatch = found["mismatch"]
    return Labelled(Mismatch(**{**mismatch, "features": tuple(mismatch["features"])}), bool(found["changed"]))
