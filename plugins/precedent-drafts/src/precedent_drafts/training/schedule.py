"""The recipe of a training, the plan derived from it, and the checkpoints from which a killed training resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from precedent.config import check_fields
from precedent.errors import ConfigError, ModelLoadError
from precedent_drafts.trained import holds_draft, read_settings
from precedent_drafts.training.texts import Lesson

CHECKPOINT_STEPS = 50
"""Steps between checkpoints; a kill loses at most this many."""

COLLECTING_SHARE = 0.45
"""Share of the time for the target to write and read texts; the rest is for training the draft."""

ROLLOUT_SHARE = 3
"""Each later round adds one piece of the draft's texts for this many pieces of the target's texts."""

STARTS = ("ends", "first", "last")

PLAN_FILE, CHECKPOINT_FILE = "plan.json", "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Planned work: pieces of the target's texts, pieces of rollouts in each later round, rounds, steps per round.

    `completions` is the maximum number of pieces of the given completions to read.
    """

    chunks: int
    completions: int
    rollouts: int
    rounds: int
    steps_per_round: int

    @property
    def steps(self) -> int:
        """Number of steps in all rounds."""
        return self.rounds * self.steps_per_round


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train a draft.

    `num_layers` layers start as copies of the target's: evenly spaced from first to last (`start` "ends"), its "first"
    or its "last" ones; or as those of a trained draft, if `start` is its folder. The head covers the `head_tokens`
    most frequent tokens (0: all). The target answers `chunk_prompts` prompts at a time, with at most `answer_tokens`
    tokens at `temperature`. A step learns about `batch_tokens` tokens; each answer is seen with at most
    `longest_context` tokens of context. Raises ConfigError if a value is out of range.
    """

    num_layers: int = 2
    start: str = "ends"
    head_tokens: int = 8192
    temperature: float = 1.0
    answer_tokens: int = 128
    chunk_prompts: int = 16
    rounds: int = 3
    batch_tokens: int = 512
    longest_context: int = 512
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("num_layers", 1 <= self.num_layers <= 3, "must be 1, 2 or 3"),
            (
                "start",
                self.start in STARTS or holds_draft(self.start),
                f"must be {', '.join(STARTS)} or a draft's folder",
            ),
            ("head_tokens", self.head_tokens >= 0, "must be 0 (all) or a number of tokens"),
            ("temperature", self.temperature > 0, "must be greater than 0"),
            ("answer_tokens", self.answer_tokens >= 1, "must be at least 1"),
            ("rounds", self.rounds >= 1, "must be at least 1"),
            ("learning_rate", self.learning_rate > 0, "must be greater than 0"),
        )
        check_fields(self, checks)

    def initial_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers that the draft starts from. Raises ConfigError if the draft would not be smaller."""
        if self.start not in STARTS:
            return self._layers_of_draft()
        return initial_layers(self.start, self.num_layers, num_target_layers)

    def _layers_of_draft(self) -> tuple[int, ...]:
        settings = read_settings(Path(self.start))
        if settings.exit_layer is not None or settings.fusion is not None:
            raise ConfigError(
                f"start={self.start!r} holds {settings.kind}, and only a chain of tokens alone is trained on"
            )
        found = settings.initial_layers
        if len(found) != self.num_layers:
            raise ConfigError(f"the draft {self.start} has {len(found)} layers, not {self.num_layers}; ask for as many")
        return found

    def planned(self, minutes: float, chunk_seconds: float, step_seconds: float) -> Schedule:
        """Plan about `minutes` of work, given the seconds that a piece of collecting and a training step take.

        Training keeps its share of the time even if the first piece of collecting took longer than its own.
        """
        seconds, later = 60.0 * minutes, self.rounds - 1
        chunks = max(1, int(COLLECTING_SHARE * seconds / chunk_seconds / (1 + later / ROLLOUT_SHARE)))
        rollouts = max(1, chunks // ROLLOUT_SHARE)
        left = max(seconds - (chunks + later * rollouts) * chunk_seconds, (1 - COLLECTING_SHARE) * seconds)
        return Schedule(chunks, chunks, rollouts, self.rounds, max(1, int(left / step_seconds / self.rounds)))

    def batches(self, lessons: Sequence[Lesson], round_index: int) -> Iterator[list[Lesson]]:
        """Endless batches, with each lesson once per epoch; the same lessons and round give the same batches."""
        epoch = 0
        while True:
            order = np.random.default_rng([self.seed, round_index, epoch]).permutation(len(lessons)).tolist()
            batch: list[Lesson] = []
            for place in order:
                batch.append(lessons[place])
                if sum(lesson.num_learned for lesson in batch) >= self.batch_tokens:
                    yield batch
                    batch = []
            if batch:
                yield batch
            epoch += 1


def initial_layers(start: str, count: int, num_target_layers: int) -> tuple[int, ...]:
    """The target's layers, as many as `count`, from which `start` ("ends", "first" or "last") lets a draft begin.

    Raises ConfigError if the draft would not be smaller.
    """
    last = num_target_layers - 1
    if num_target_layers <= count:
        raise ConfigError(f"a draft of {count} layers is not smaller than its target of {num_target_layers}")
    chosen = {
        "first": range(count),
        "last": range(num_target_layers - count, num_target_layers),
        "ends": [round(place * last / max(count - 1, 1)) for place in range(count)],
    }
    return tuple(chosen[start])


def write_plan(folder: Path, begun: Any) -> None:
    """Write a training, a data class, to its folder atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{PLAN_FILE}.partial"
    partial.write_text(json.dumps(dataclasses.asdict(begun), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / PLAN_FILE)


@dataclass(frozen=True, slots=True)
class Begun:
    """A training as stored in its folder: the target, the recipe, the texts and the plan."""

    target: str
    recipe: Recipe
    prompts: str
    plan: Schedule

    def write(self, folder: Path) -> Self:
        """Write the training to its folder atomically."""
        write_plan(folder, self)
        return self

    @classmethod
    def read(cls, folder: Path) -> Begun | None:
        """Read the training in a folder, None if there is none. Raises ConfigError if it cannot be read."""
        if not (folder / PLAN_FILE).is_file():
            return None
        try:
            found: dict[str, Any] = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
            recipe, plan = Recipe(**found["recipe"]), Schedule(**found["plan"])
            return cls(found["target"], recipe, found["prompts"], plan)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder / PLAN_FILE} cannot be read ({error}); start again in another folder"
            ) from error

    def check_same(self, other: Begun) -> None:
        """Raise ConfigError, naming the first difference, unless `other` is the same training."""
        pairs = [("target", self.target, other.target), ("prompts", self.prompts, other.prompts)]
        own, theirs = dataclasses.asdict(self.recipe), dataclasses.asdict(other.recipe)
        for name, begun, given in [*pairs, *((key, own[key], theirs[key]) for key in own)]:
            if begun != given:
                raise ConfigError(
                    f"the training in this folder has another {name} ({begun} there, {given} now); "
                    "resume it with the same settings, or start another one in a new folder"
                )


class Learner(Protocol):
    """A draft in training."""

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""


def save_checkpoint(folder: Path, student: Learner, step: int) -> None:
    """Replace the last checkpoint atomically with the state after `step` steps."""
    partial = folder / f"{CHECKPOINT_FILE}.partial"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in student.state().items()}
    save_file(tensors, partial, metadata={"step": str(step)})
    partial.replace(folder / CHECKPOINT_FILE)


def restore_checkpoint(folder: Path, student: Learner) -> int:
    """Restore the student from the last checkpoint; returns its number of steps, 0 without a checkpoint."""
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        return 0
    try:
        with safe_open(path, framework="pt") as opened:
            student.restore({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # not a mapping
            return int(opened.metadata()["step"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}); delete it to start the rounds again") from error
