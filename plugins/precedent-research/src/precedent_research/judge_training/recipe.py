"""How to train a judge, and what has been labelled so far; both lie in its folder until it ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from precedent.config import check_fields
from precedent.errors import ConfigError, ModelLoadError
from precedent_drafts.files import save_json
from precedent_drafts.training.training import PLAN_FILE
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


@dataclass(frozen=True, slots=True)
class BegunJudge:
    """A training as stored in its folder."""

    target: str
    draft: str
    runs: str
    outcome: str
    max_tokens: int
    recipe: JudgeRecipe

    def write(self, folder: Path) -> None:
        """Write the training to its folder atomically."""
        save_json(folder / PLAN_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the training in a folder, None if there is none. Raises ConfigError if it cannot be read."""
        if not (folder / PLAN_FILE).is_file():
            return None
        try:
            found: dict[str, Any] = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
            recipe = found.pop("recipe")
            return cls(**found, recipe=JudgeRecipe(**{**recipe, "features": tuple(recipe["features"])}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder / PLAN_FILE} is no plan for a judge ({error!r}); start again in another folder"
            ) from error

    def check_same(self, other: BegunJudge) -> None:
        """Raise ConfigError, naming the first difference, unless `other` is the same training."""
        self._compare(other, _settings(self).keys(), "resume it with the same settings, or start in a new folder")

    def check_labels(self, other: BegunJudge) -> None:
        """Raise ConfigError, naming the first difference, unless `other` would label the same with these features."""
        names = _settings(self).keys() - OF_LEARNING
        self._compare(other, names, "leave --labels out to label anew")
        lacking = [name for name in other.recipe.features if name not in self.recipe.features]
        if lacking:
            raise ConfigError(f"the labels lack the features {', '.join(lacking)}: leave --labels out to label anew")

    def _compare(self, other: BegunJudge, names: Iterable[str], advice: str) -> None:
        own, theirs = _settings(self), _settings(other)
        for name in (name for name in own if name in names and own[name] != theirs[name]):
            raise ConfigError(
                f"the training in this folder has another {name} ({own[name]} there, {theirs[name]} now); {advice}"
            )


def _settings(begun: BegunJudge) -> dict[str, Any]:
    """All settings by name, those of the recipe beside the others."""
    settings = dataclasses.asdict(begun)
    recipe = settings.pop("recipe")
    return {**settings, **recipe}
