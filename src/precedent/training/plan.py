"""What a training is asked for, what was decided from it, and where a killed one goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from precedent.config import check_fields
from precedent.errors import ConfigError, ModelLoadError
from precedent.target.load.trained_draft import holds_draft, read_settings
from precedent.training.student import Student
from precedent.training.texts import Lesson

CHECKPOINT_STEPS = 50
"""A kill costs at most so many steps."""

COLLECTING_SHARE = 0.45
"""Part of the minutes in which the target writes and reads; the rest is the draft's."""

ROLLOUT_SHARE = 3
"""For so many pieces of the target's own texts a later round gets one of what the draft wrote."""

STARTS = ("ends", "first", "last")

PLAN_FILE, CHECKPOINT_FILE = "plan.json", "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """Work that was decided: pieces of the target's texts, pieces of rollouts in each later round, rounds, steps.

    `completions` is how many pieces of those given are read at most.
    """

    chunks: int
    completions: int
    rollouts: int
    rounds: int
    steps_per_round: int

    @property
    def steps(self) -> int:
        """Steps of all rounds."""
        return self.rounds * self.steps_per_round


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is trained.

    `num_layers` layers begin as some of the target's: its first and last ones (`start` "ends"), its "first" or its
    "last"; or as those of a trained draft, whose folder `start` then is. The head knows the `head_tokens` most frequent
    tokens, 0: all. The target answers `chunk_prompts` prompts at a time, by at most `answer_tokens`, at `temperature`.
    A step learns about `batch_tokens` tokens, each seen with at most `longest_context` before its answer. Raises
    ConfigError when a value is out of its range.
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
        """The target's layers with which the draft began. Raises ConfigError when it has no more than the draft."""
        if self.start not in STARTS:
            return self._layers_of_draft()
        count, last = self.num_layers, num_target_layers - 1
        if num_target_layers <= count:
            raise ConfigError(f"a draft of {count} layers is not smaller than its target of {num_target_layers}")
        chosen = {
            "first": range(count),
            "last": range(num_target_layers - count, num_target_layers),
            "ends": [round(place * last / max(count - 1, 1)) for place in range(count)],
        }
        return tuple(chosen[self.start])

    def _layers_of_draft(self) -> tuple[int, ...]:
        found = read_settings(Path(self.start)).initial_layers
        if len(found) != self.num_layers:
            raise ConfigError(f"the draft {self.start} has {len(found)} layers, not {self.num_layers}; ask for as many")
        return found

    def planned(self, minutes: float, chunk_seconds: float, step_seconds: float) -> Plan:
        """The work that takes about so many minutes, when a piece of collecting and a step take so many seconds.

        Learning gets its share also where the first piece of collecting has taken more than its own.
        """
        seconds, later = 60.0 * minutes, self.rounds - 1
        chunks = max(1, int(COLLECTING_SHARE * seconds / chunk_seconds / (1 + later / ROLLOUT_SHARE)))
        rollouts = max(1, chunks // ROLLOUT_SHARE)
        left = max(seconds - (chunks + later * rollouts) * chunk_seconds, (1 - COLLECTING_SHARE) * seconds)
        return Plan(chunks, chunks, rollouts, self.rounds, max(1, int(left / step_seconds / self.rounds)))

    def batches(self, lessons: Sequence[Lesson], round_index: int) -> Iterator[list[Lesson]]:
        """Batches without end, every lesson once before any comes again: the same for the same lessons and round."""
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


@dataclass(frozen=True, slots=True)
class Begun:
    """A training as it stands in its folder: for whom, how, on what, and what was decided."""

    target: str
    recipe: Recipe
    prompts: str
    plan: Plan

    def write(self, folder: Path) -> Self:
        """Put it down, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{PLAN_FILE}.partial"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / PLAN_FILE)
        return self

    @classmethod
    def read(cls, folder: Path) -> Begun | None:
        """What was begun in a folder, None where nothing was. Raises ConfigError when it cannot be read."""
        if not (folder / PLAN_FILE).is_file():
            return None
        try:
            found: dict[str, Any] = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
            recipe, plan = Recipe(**found["recipe"]), Plan(**found["plan"])
            return cls(found["target"], recipe, found["prompts"], plan)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder / PLAN_FILE} cannot be read ({error}); begin again in another folder"
            ) from error

    def check_same(self, other: Begun) -> None:
        """Raise ConfigError, naming the first difference, unless both are the same training."""
        pairs = [("target", self.target, other.target), ("prompts", self.prompts, other.prompts)]
        own, theirs = dataclasses.asdict(self.recipe), dataclasses.asdict(other.recipe)
        for name, begun, given in [*pairs, *((key, own[key], theirs[key]) for key in own)]:
            if begun != given:
                raise ConfigError(
                    f"the training that was begun has another {name} ({begun} there, {given} now); "
                    "resume it as it was begun, or begin another one in a new folder"
                )


def save_checkpoint(folder: Path, student: Student, step: int) -> None:
    """Write the state after `step` steps in place of the one before, whole or not at all."""
    partial = folder / f"{CHECKPOINT_FILE}.partial"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in student.state().items()}
    save_file(tensors, partial, metadata={"step": str(step)})
    partial.replace(folder / CHECKPOINT_FILE)


def restore_checkpoint(folder: Path, student: Student) -> int:
    """Put the student back to the last checkpoint; returns the number of its steps, 0 without one."""
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        return 0
    try:
        with safe_open(path, framework="pt") as opened:
            student.restore({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # no mapping
            return int(opened.metadata()["step"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}); delete it, and the rounds begin again") from error
