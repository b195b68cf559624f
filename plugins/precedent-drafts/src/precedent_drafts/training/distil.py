"""Distillation from beginning to end: the target writes texts, the draft learns from them in rounds and is saved.

Whatever depends on the clock (how much to collect, how many steps to take) is fixed in a plan beforehand; from then on
the draft is a function of plan, recipe, target and prompts. Each finished piece of work is saved atomically, so a
killed training resumes and ends with the same draft.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.errors import UnsupportedError
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent.target.load.first_layers import layers_of
from precedent.text.end_tokens import end_token_ids
from precedent_drafts.trained import (
    DraftSettings,
    load_weights,
    save_draft,
)
from precedent_drafts.training.head import check_head
from precedent_drafts.training.prompts import Prompt, fingerprint_of
from precedent_drafts.training.schedule import (
    CHECKPOINT_STEPS,
    STARTS,
    Begun,
    Recipe,
    Schedule,
    restore_checkpoint,
    save_checkpoint,
)
from precedent_drafts.training.student import Student
from precedent_drafts.training.teacher import Author, Teacher
from precedent_drafts.training.texts import Lesson, Shard, Text

WORK_FOLDER = "training"
"""Folder inside the draft's folder; it holds texts and is deleted at the end."""

STEPS_TIMED = 3

FROM_DRAFT = 1 << 32
"""Offset that separates the seeds of the draft's texts from those of the target's texts."""

Progress = Callable[[str, int, int, float | None], None]
"""Called with the phase, the number done, the total, and the loss if there is one."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished draft, the work that went into it, and the number of target tokens it learned from."""

    draft: PreTrainedModel
    plan: Schedule
    num_tokens: int


class Distillation:
    """One training of a draft for `target` in the folder `out`.

    The draft learns from the target's answers to `prompts` and from the target's earlier `completions`. Raises
    UnsupportedError if no draft can be trained on the target's embeddings and head, ConfigError if `out` holds a
    different training. `announce` is called once, before the training proper starts, with what it will cost. A
    checkpoint is written every `checkpoint_steps` steps and at the end of a round.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        recipe: Recipe,
        out: Path,
        *,
        completions: Sequence[Text] = (),
        progress: Progress = lambda *_: None,
        announce: Callable[[str], None] = lambda _: None,
        checkpoint_steps: int = CHECKPOINT_STEPS,
    ) -> None:
        check_trainable(target)
        self._checkpoint_steps, self._announce = checkpoint_steps, announce
        self._target, self._tokenizer, self._recipe, self._progress = target, tokenizer, recipe, progress
        self._prompts, self._completions = prompts, completions
        self._out, self._work = out, out / WORK_FOLDER
        self._teacher = Teacher(target)
        self._initial_layers = recipe.initial_layers(len(layers_of(target)))
        begun = recipe.start not in STARTS
        self._initial_weights = load_weights(Path(recipe.start), target)[1] if begun else None

    def run(self, work: float | Schedule) -> Trained:
        """Train for about `work` minutes, or by the plan `work`, or resume; saves and returns the draft."""
        plan = self._begun(work).plan
        own = self._collect(plan.chunks) + self._read_completions(plan)
        student = self._student(own)
        self._train(student, own, plan)
        save_draft(self._out, self._settings(student), student.weights())
        shutil.rmtree(self._work)
        return Trained(student.draft(), plan, sum(shard.num_tokens for shard in own))

    def _begun(self, work: float | Schedule) -> Begun:
        """Read and check the training in the folder, or start one with a new plan."""
        found = Begun.read(self._work)
        asked = self._asked(found.plan if found else Schedule(1, 0, 0, 1, 0))
        if found:
            found.check_same(asked)
            return found
        for piece in self._work.glob("*.safetensors*"):
            piece.unlink()  # written before there was a plan, by an unknown recipe
        return self._asked(work if isinstance(work, Schedule) else self._planned(work)).write(self._work)

    def _asked(self, plan: Schedule) -> Begun:
        target = embeddings_fingerprint(self._target) + layers_fingerprint(self._target)
        texts = fingerprint_of([*self._prompts, *(text.token_ids for text in self._completions)])
        return Begun(target, self._recipe, texts, plan)

    def _planned(self, minutes: float) -> Schedule:
        """Plan for so many minutes by timing a first piece of work on this machine; its texts are kept."""
        started = perf_counter()
        shards = self._collect(1)
        chunk_seconds = perf_counter() - started
        student, batch = self._student(shards), next(self._recipe.batches(shards[0].lessons, 0))
        started = perf_counter()
        for _ in range(STEPS_TIMED):
            student.step(batch, 0.0, self._recipe.longest_context)
        step_seconds = (perf_counter() - started) / STEPS_TIMED
        plan = self._recipe.planned(minutes, chunk_seconds, step_seconds)
        self._announce(self._cost_of(plan, chunk_seconds, step_seconds))
        return plan

    def _cost_of(self, plan: Schedule, chunk_seconds: float, step_seconds: float) -> str:
        """What a plan costs, in words."""
        size, rollouts = self._recipe.chunk_prompts, (plan.rounds - 1) * plan.rollouts
        chunks = plan.chunks + min(plan.completions, -(-len(self._completions) // size)) + rollouts
        minutes = (chunks * chunk_seconds + plan.steps * step_seconds) / 60
        megabytes = chunks * (self._work / "answers-0000.safetensors").stat().st_size / 1e6
        return (
            f"about {minutes:.0f} minutes: {plan.chunks * size} answers of the target, {rollouts * size} of the draft, "
            f"{plan.steps} steps, {megabytes:.0f} MB in {self._work} until it ends"
        )

    # Texts to learn from

    def _collect(self, chunks: int) -> list[Shard]:
        """Collect the target's answers to the prompts, cycling through these as often as needed."""
        size = self._recipe.chunk_prompts

        def texts(author: Author, index: int) -> list[Text]:
            places = range(index * size, (index + 1) * size)
            contexts = [self._prompts[place % len(self._prompts)] for place in places]
            return author.texts(contexts, [self._recipe.seed + place for place in places], self._recipe.answer_tokens)

        return self._shards("answers", range(chunks), lambda: self._target, texts)

    def _read_completions(self, plan: Schedule) -> list[Shard]:
        """Run the target over its earlier completions, as many as planned, and collect their lessons."""
        size = self._recipe.chunk_prompts
        kept = self._completions[: plan.completions * size]
        shards = []
        for index in range(-(-len(kept) // size)):
            path = self._work / f"completions-{index:04}.safetensors"
            if not path.is_file():
                self._progress("reading completions", index * size, len(kept), None)
                self._teacher.shard(kept[index * size : (index + 1) * size]).save(path)
            shards.append(Shard.load(path))
        return shards

    def _rollouts(self, student: Student, own: Sequence[Shard], plan: Schedule, round_index: int) -> list[Shard]:
        """On-policy lessons: the draft continues the target's answers from random places; the target scores them."""
        size = self._recipe.chunk_prompts
        answers = [lesson.text for shard in own for lesson in shard.lessons]

        def texts(author: Author, index: int) -> list[Text]:
            random = np.random.default_rng([self._recipe.seed, FROM_DRAFT, index])
            chosen = [answers[place] for place in random.integers(len(answers), size=size)]
            contexts = [_cut(text, float(random.random())) for text in chosen]
            seeds = [FROM_DRAFT + index * size + place for place in range(size)]
            return author.texts(contexts, seeds, self._recipe.answer_tokens // 2)

        chunks = range((round_index - 1) * plan.rollouts, round_index * plan.rollouts)
        return self._shards("rollouts", chunks, student.draft, texts)

    def _shards(
        self,
        kind: str,
        indices: range,
        writer: Callable[[], PreTrainedModel],
        texts: Callable[[Author, int], list[Text]],
    ) -> list[Shard]:
        """Load the shards of these indices. Missing ones are generated by a model, scored by the teacher and saved."""
        paths = {index: self._work / f"{kind}-{index:04}.safetensors" for index in indices}
        missing = [index for index in indices if not paths[index].is_file()]
        if missing:
            with closing(Author(writer(), self._tokenizer, self._recipe.temperature)) as author:
                for index in missing:
                    self._progress(kind, index - indices.start, len(indices), None)
                    self._teacher.shard(texts(author, index)).save(paths[index])
        return [Shard.load(path) for path in paths.values()]

    # Learning

    def _student(self, shards: Sequence[Shard]) -> Student:
        kept, frequencies = self._recipe.head_tokens, torch.stack([shard.frequencies for shard in shards]).sum(0)
        ids = None
        if 0 < kept < frequencies.numel():
            ids = most_frequent(frequencies, kept, end_token_ids(self._target, self._tokenizer))
        return Student(self._target, self._initial_layers, ids, self._recipe.learning_rate, self._initial_weights)

    def _train(self, student: Student, own: Sequence[Shard], plan: Schedule) -> None:
        lessons = [lesson for shard in own for lesson in shard.lessons]
        done = restore_checkpoint(self._work, student)
        for index in range(plan.rounds):
            if index:
                lessons += [lesson for shard in self._rollouts(student, own, plan, index) for lesson in shard.lessons]
            first, last = index * plan.steps_per_round, (index + 1) * plan.steps_per_round
            self._round(student, islice(self._recipe.batches(lessons, index), max(0, done - first), None),
                        range(max(done, first), last), plan.steps)  # fmt: skip

    def _round(self, student: Student, batches: islice[list[Lesson]], steps: range, all_steps: int) -> None:
        for step in steps:
            loss = student.step(next(batches), step / all_steps, self._recipe.longest_context)
            self._progress("training", step + 1, all_steps, loss)
            if (step + 1) % self._checkpoint_steps == 0 or step + 1 == steps.stop:
                save_checkpoint(self._work, student, step + 1)

    def _settings(self, student: Student) -> DraftSettings:
        return DraftSettings(
            target=name_of(self._target),
            embeddings=embeddings_fingerprint(self._target),
            layers=layers_fingerprint(self._target),
            initial_layers=student.initial_layers,
            num_head_tokens=None if student.head_tokens is None else student.head_tokens.numel(),
        )


def most_frequent(frequencies: Tensor, count: int, always: frozenset[int]) -> Tensor:
    """The ids of the `count` tokens with most mass and of those `always` kept, ascending; ties prefer the lower id."""
    order = torch.sort(frequencies, descending=True, stable=True).indices[:count]
    return torch.tensor(sorted({*order.tolist(), *always}))


def _cut(text: Text, place: float) -> Prompt:
    """Cut a text at the relative `place` within its learned tokens."""
    return text.token_ids[: text.num_context_tokens + text.places[int(place * len(text.places))]]


def check_trainable(target: PreTrainedModel) -> None:
    """Raise UnsupportedError if no draft can be trained on a target's embeddings, layers and head."""
    if getattr(target.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{name_of(target)} is quantised, so no layers can be copied from it; load it in full precision"
        )
    layers_of(target)
    check_head(target)
