"""A training on lessons, from beginning to end: the target answers prompts and reads texts, a draft learns, is saved.

A subclass says what its draft learns and how it is saved. As in `distil`, whatever depends on the clock is fixed in a
plan beforehand, each finished piece of work is saved atomically, and a killed training resumes and ends with the same
draft.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.errors import PromptError
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint
from precedent.text.end_tokens import end_token_ids
from precedent_drafts.training.block_lessons import BlockLesson, BlockShard, BlockTeacher
from precedent_drafts.training.distil import STEPS_TIMED, WORK_FOLDER, Progress, check_trainable, most_frequent
from precedent_drafts.training.lesson_plan import BegunLessons, LessonPlan, LessonRecipe
from precedent_drafts.training.prompts import Prompt, fingerprint_of
from precedent_drafts.training.schedule import CHECKPOINT_STEPS, Learner, restore_checkpoint, save_checkpoint
from precedent_drafts.training.teacher import Author
from precedent_drafts.training.texts import Text

RecipeT = TypeVar("RecipeT", bound=LessonRecipe)
StudentT = TypeVar("StudentT", bound=Learner)


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A finished draft, the work that went into it, and the number of target tokens it learned from."""

    draft: PreTrainedModel
    plan: LessonPlan
    num_tokens: int


class LessonTraining(ABC, Generic[RecipeT, StudentT]):
    """One training of a draft for `target` in the folder `out`.

    The draft learns from the target's answers to `prompts` and from earlier `completions`. `announce` is called once,
    before the training proper starts, with what it will cost. Lessons lie in `out` until it ends, or stay in the folder
    `lessons` for trainings that read the same of the same texts. Raises UnsupportedError if no draft can be trained on
    the target, ConfigError if `out` holds a different training.
    """

    kind: ClassVar[str]
    """What is trained, in words."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        recipe: RecipeT,
        out: Path,
        *,
        completions: Sequence[Text] = (),
        progress: Progress = lambda *_: None,
        announce: Callable[[str], None] = lambda _: None,
        checkpoint_steps: int = CHECKPOINT_STEPS,
        lessons: Path | None = None,
    ) -> None:
        check_trainable(target)
        self._target, self._tokenizer, self._prompts, self._recipe = target, tokenizer, prompts, recipe
        self._completions, self._out, self._work = completions, out, out / WORK_FOLDER
        self._progress, self._announce, self._checkpoint_steps = progress, announce, checkpoint_steps
        self._kept = lessons

    @abstractmethod
    def _teacher(self) -> BlockTeacher:
        """What makes the lessons."""

    @abstractmethod
    def _student(self, shards: Sequence[BlockShard]) -> StudentT:
        """The draft as it is before the first step."""

    @abstractmethod
    def _step(self, student: StudentT, lessons: Sequence[BlockLesson], step: int, all_steps: int) -> float:
        """Take one step on these lessons, and return the loss."""

    @abstractmethod
    def _saved(self, student: StudentT) -> PreTrainedModel:
        """Write the draft's folder, and return the draft."""

    def run(self, work: float | LessonPlan) -> TrainedDraft:
        """Train for about `work` minutes, or by the plan `work`, or resume; saves and returns the draft."""
        plan = self._begun(work)
        shards = [*self._answers(plan.chunks), *self._read_completions(plan.completions)]
        lessons = [lesson for shard in shards for lesson in shard.lessons if lesson.anchors]
        if not lessons:
            raise PromptError("the target's answers hold nothing to learn from: give other prompts, or completions")
        student = self._student(shards)
        for step in range(restore_checkpoint(self._work, student), plan.steps):
            loss = self._step(student, self._batch(lessons, step), step, plan.steps)
            self._progress("training", step + 1, plan.steps, loss)
            if (step + 1) % self._checkpoint_steps == 0 or step + 1 == plan.steps:
                save_checkpoint(self._work, student, step + 1)
        draft = self._saved(student)
        shutil.rmtree(self._work)
        return TrainedDraft(draft, plan, sum(shard.num_tokens for shard in shards))

    def _begun(self, work: float | LessonPlan) -> LessonPlan:
        """The plan of the training in the folder, checked, or a new one."""
        target, texts = self._fingerprints
        found = BegunLessons.read(self._work, self.kind)
        if found is not None:
            found.check_same(target, texts, self._recipe)
            return found.plan
        for piece in self._work.glob("*.safetensors*"):
            piece.unlink()  # written before there was a plan, by an unknown recipe
        plan = work if isinstance(work, LessonPlan) else self._planned(work)
        recipe: Any = self._recipe
        BegunLessons(self.kind, target, texts, dataclasses.asdict(recipe), plan).write(self._work)
        return plan

    def _planned(self, minutes: float) -> LessonPlan:
        """Plan for so many minutes by timing a first piece of work on this machine; its texts are kept."""
        started = perf_counter()
        shards = self._answers(1)
        chunk_seconds = perf_counter() - started
        student, lessons = self._student(shards), [lesson for lesson in shards[0].lessons if lesson.anchors]
        if not lessons:
            raise PromptError("the target's first answers are empty: give other prompts")
        started = perf_counter()
        for step in range(STEPS_TIMED):
            self._step(student, self._batch(lessons, step), step, STEPS_TIMED)
        step_seconds = (perf_counter() - started) / STEPS_TIMED
        plan = LessonPlan.of(minutes, chunk_seconds, step_seconds)
        self._announce(self._cost_of(plan, chunk_seconds, step_seconds))
        return plan

    def _cost_of(self, plan: LessonPlan, chunk_seconds: float, step_seconds: float) -> str:
        """What a plan costs, in words."""
        size = (self._lessons / "answers-0000.safetensors").stat().st_size
        read = min(plan.completions, -(-len(self._completions) // self._recipe.chunk_prompts))
        minutes = ((plan.chunks + read) * chunk_seconds + plan.steps * step_seconds) / 60
        how_long = " until it ends" if self._kept is None else ""
        return (
            f"about {minutes:.0f} minutes: {plan.chunks * self._recipe.chunk_prompts} answers of the target, "
            f"{plan.steps} steps, {(plan.chunks + read) * size / 1e6:.0f} MB in {self._lessons}{how_long}"
        )

    # Texts to learn from

    @cached_property
    def _reading(self) -> BlockTeacher:
        return self._teacher()

    @cached_property
    def _fingerprints(self) -> tuple[str, str]:
        """Those of the target and of the texts."""
        target = embeddings_fingerprint(self._target) + layers_fingerprint(self._target)
        return target, fingerprint_of([*self._prompts, *(text.token_ids for text in self._completions)])

    @cached_property
    def _lessons(self) -> Path:
        """Where lessons lie: those that stay do so under the name of all that they depend on."""
        if self._kept is None:
            return self._work
        recipe = self._recipe
        answered = (recipe.temperature, recipe.answer_tokens, recipe.chunk_prompts, recipe.seed)
        said = repr((*self._fingerprints, self._reading.reads, self._reading.context_tokens, answered))
        return self._kept / hashlib.sha256(said.encode()).hexdigest()[:16]

    def _answers(self, chunks: int) -> list[BlockShard]:
        """The target's answers to the prompts, cycling through these as often as needed."""
        size, paths = (
            self._recipe.chunk_prompts,
            [self._lessons / f"answers-{index:04}.safetensors" for index in range(chunks)],
        )
        if all(path.is_file() for path in paths):
            return [BlockShard.load(path) for path in paths]
        with closing(Author(self._target, self._tokenizer, self._recipe.temperature)) as author:

            def answers(index: int) -> list[Text]:
                places = range(index * size, (index + 1) * size)
                contexts = [self._prompts[place % len(self._prompts)] for place in places]
                seeds = [self._recipe.seed + place for place in places]
                return author.texts(contexts, seeds, self._recipe.answer_tokens)

            return self._shards("answers", paths, answers)

    def _read_completions(self, chunks: int) -> list[BlockShard]:
        """The target's earlier completions, as many as planned."""
        size = self._recipe.chunk_prompts
        kept = self._completions[: chunks * size]
        paths = [self._lessons / f"completions-{index:04}.safetensors" for index in range(-(-len(kept) // size))]
        return self._shards("reading completions", paths, lambda index: kept[index * size : (index + 1) * size])

    def _shards(self, phase: str, paths: Sequence[Path], texts: Callable[[int], Sequence[Text]]) -> list[BlockShard]:
        """Shards from their files; missing ones are read by the target and saved."""
        for index, path in enumerate(paths):
            if not path.is_file():
                self._progress(phase, index, len(paths), None)
                self._reading.shard(texts(index)).save(path)
        return [BlockShard.load(path) for path in paths]

    # Learning

    def _head_tokens(self, shards: Sequence[BlockShard]) -> Tensor:
        """The ids of the most frequent tokens, as many as the recipe asks for, `[tokens]`."""
        frequencies = torch.stack([shard.frequencies for shard in shards]).sum(0)
        count = min(self._recipe.head_tokens or frequencies.numel(), frequencies.numel())
        return most_frequent(frequencies, count, end_token_ids(self._target, self._tokenizer))

    def _batch(self, lessons: Sequence[BlockLesson], step: int) -> list[BlockLesson]:
        """The lessons of a step."""
        return [lessons[place] for place in places_of_step(len(lessons), step, self._recipe)]


def places_of_step(count: int, step: int, recipe: LessonRecipe) -> Iterator[int]:
    """The lessons of a step: each once per epoch, in the order of a shuffle that depends on seed and epoch alone."""
    for place in range(step * recipe.batch_texts, (step + 1) * recipe.batch_texts):
        yield int(np.random.default_rng([recipe.seed, place // count]).permutation(count)[place % count])
