"""What a training on lessons is: its recipe, the plan of its work, and the record of both in its folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from precedent.errors import ConfigError
from precedent_drafts.training.schedule import COLLECTING_SHARE, PLAN_FILE, write_plan


class LessonRecipe(Protocol):
    """What every recipe says: how the target answers, and how many texts a step learns from."""

    @property
    def temperature(self) -> float:
        """Temperature of the target's answers."""

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer at most."""

    @property
    def chunk_prompts(self) -> int:
        """Prompts that are answered, or completions that are read, as one piece of work."""

    @property
    def batch_texts(self) -> int:
        """Texts of a step."""

    @property
    def head_tokens(self) -> int:
        """Size of the head, for the most frequent tokens; 0 is all."""

    @property
    def learning_rate(self) -> float:
        """The highest learning rate."""

    @property
    def seed(self) -> int:
        """Fixes the answers and the order of training."""


def common_checks(recipe: LessonRecipe) -> tuple[tuple[str, bool, str], ...]:
    """Checks of what every recipe says, for `check_fields`."""
    return (
        ("head_tokens", recipe.head_tokens >= 0, "must be 0 (all) or a number of tokens"),
        ("temperature", recipe.temperature > 0, "must be above 0"),
        ("answer_tokens", recipe.answer_tokens >= 1, "must be 1 or more"),
        ("chunk_prompts", recipe.chunk_prompts >= 1, "must be 1 or more"),
        ("batch_texts", recipe.batch_texts >= 1, "must be 1 or more"),
        ("learning_rate", recipe.learning_rate > 0, "must be above 0"),
    )


@dataclass(frozen=True, slots=True)
class LessonPlan:
    """Planned work: pieces of the target's answers, pieces of the given completions, and training steps."""

    chunks: int
    completions: int
    steps: int

    @classmethod
    def of(cls, minutes: float, chunk_seconds: float, step_seconds: float) -> Self:
        """About `minutes` of work, given the seconds that a piece of answers and a training step take."""
        seconds = 60.0 * minutes
        chunks = max(1, int(COLLECTING_SHARE * seconds / chunk_seconds))
        left = max(seconds - chunks * chunk_seconds, (1 - COLLECTING_SHARE) * seconds)
        return cls(chunks, chunks, max(1, int(left / step_seconds)))


@dataclass(frozen=True, slots=True)
class BegunLessons:
    """A training as stored in its folder: the kind of draft, the target, the texts, the recipe and the plan."""

    kind: str
    target: str
    texts: str
    recipe: dict[str, Any]
    plan: LessonPlan

    def write(self, folder: Path) -> None:
        """Write the training to its folder atomically."""
        write_plan(folder, self)

    @classmethod
    def read(cls, folder: Path, kind: str) -> Self | None:
        """Read the training in a folder, None if there is none. Raises ConfigError unless it is one of this kind."""
        if not (folder / PLAN_FILE).is_file():
            return None
        try:
            found: dict[str, Any] = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
            if found["kind"] != kind:
                raise ValueError(f"it is one for a {found['kind']}")
            return cls(kind, found["target"], found["texts"], found["recipe"], LessonPlan(**found["plan"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder / PLAN_FILE} is no plan for a {kind} ({error!r}); resume it with the kind it was begun "
                "with, or start again in another folder"
            ) from error

    def check_same(self, target: str, texts: str, recipe: Any) -> None:
        """Raise ConfigError, naming the first difference, unless this is the training that is asked for."""
        asked = json.loads(json.dumps(dataclasses.asdict(recipe)))
        pairs = [("target", self.target, target), ("texts", self.texts, texts)]
        for name, begun, given in [*pairs, *((key, self.recipe.get(key), asked[key]) for key in asked)]:
            if begun != given:
                raise ConfigError(
                    f"the training in this folder has another {name} ({begun} there, {given} now); "
                    "resume it with the same settings, or start another one in a new folder"
                )
