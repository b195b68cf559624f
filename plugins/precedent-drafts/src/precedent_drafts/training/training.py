"""A training from beginning to end: the target writes and reads texts, a draft learns from them and is saved.

Whatever depends on the clock (how much to collect, how many steps to take) is fixed in a plan beforehand; from then on
the draft is a function of plan, recipe, target and prompts. Each finished piece of work is saved atomically, so a
killed training resumes and ends with the same draft.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.config import check_fields
from precedent.errors import ConfigError, ModelLoadError, PromptError
from precedent.text.end_tokens import end_token_ids
from precedent_drafts.fingerprints import embeddings_fingerprint, layers_fingerprint
from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import DraftSettings, load_trained, save_draft, save_json, save_tensors
from precedent_drafts.training.lessons import (
    ROWS_AT_ONCE,
    Author,
    Lesson,
    OutputHead,
    Shard,
    Teacher,
    Text,
    check_trainable,
)
from precedent_drafts.training.prompts import Prompt, fingerprint_of

WORK_FOLDER = "training"
"""Folder inside the draft's folder; it holds texts and is deleted at the end."""

PLAN_FILE, CHECKPOINT_FILE = "plan.json", "checkpoint.safetensors"

CHECKPOINT_STEPS = 50
"""Steps between checkpoints; a kill loses at most this many."""

COLLECTING_SHARE = 0.45
"""Share of the time for the target to write and read texts; the rest is for training the draft."""

ROLLOUT_SHARE = 3
"""Each later round adds one piece of the draft's texts for this many pieces of the target's texts."""

STEPS_TIMED = 3

FROM_DRAFT = 1 << 32
"""Offset that separates the seeds of the draft's texts from those of the target's texts."""

WARM_UP, LEAST_RATE = 0.05, 0.1
"""Share of the steps in which the learning rate rises; then it falls along a cosine to this share of its maximum."""

LARGEST_NORM = 1.0
"""Maximum gradient norm; larger gradients are scaled down."""


class Student(ABC):
    """A draft in training beside a frozen target. `head_tokens` `[tokens]` are the ids that its head covers, None: all.

    It trains in float32, or in float64 as its target. A subclass calls `trains` with its weights by the names of its
    folder; `own_settings` are those of `DraftSettings` that say what it is.
    """

    own_settings: Mapping[str, Any]

    def __init__(self, target: PreTrainedModel, head_tokens: Tensor | None) -> None:
        self.target, self.head_tokens = target, head_tokens
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self.head = OutputHead(target, self.dtype, head_tokens)

    def trains(self, weights: Mapping[str, Tensor], learning_rate: float) -> None:
        """Begin to train these weights: AdamW, a warm-up, then a cosine."""
        self.by_name = {name: weight.requires_grad_(True) for name, weight in weights.items()}
        self._learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.by_name.values(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-8)

    @abstractmethod
    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean loss of step `number` on some lessons, and return that loss."""

    def step(self, lessons: Sequence[Lesson], number: int, steps: int) -> float:
        """Take step `number` of so many on a batch of lessons, and return the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.learn(lessons, number)
        torch.nn.utils.clip_grad_norm_(self.by_name.values(), LARGEST_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_at(number / steps)
        self.optimizer.step()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """The weights to save in a draft's folder, in the target's precision."""
        saved = torch.float32 if self.dtype == self.target.dtype else self.target.dtype
        found = {name: weight.detach().to(saved) for name, weight in self.by_name.items()}
        return found if self.head_tokens is None else {**found, HEAD_TOKENS: self.head_tokens.to(torch.int32)}

    def save(self, folder: Path) -> PreTrainedModel:
        """Write the draft's folder, and return the draft."""
        covered = None if self.head_tokens is None else self.head_tokens.numel()
        save_draft(folder, DraftSettings.of(self.target, num_head_tokens=covered, **self.own_settings), self.weights())
        return load_trained(folder, self.target)

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""
        found: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in self.by_name.items()}
        for name, weight in self.by_name.items():
            found |= {f"{key}.{name}": value for key, value in self.optimizer.state[weight].items()}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        for name, weight in self.by_name.items():
            weight.copy_(state[f"weight.{name}"])
            self.optimizer.state[weight] = {
                key: state[f"{key}.{name}"].to(weight.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def rate_at(done: float) -> float:
    """The learning rate's factor after the share `done` of all steps."""
    if done < WARM_UP:
        return max(done, WARM_UP / 10) / WARM_UP
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def learn_divergence(head: OutputHead, rows: Tensor, hidden: Tensor, log_total: Tensor, share: float) -> float:
    """Add the gradient of the divergence to `rows.grad`, and return the cross-entropy; each row counts by its `share`.

    `rows` `[rows, hidden_size]` are a draft's final hidden states, a leaf that requires gradients; `hidden` are the
    target's, with the log-sum-exp of all its logits `log_total` `[rows]`. The gradient at the logits is
    `draft_probs * mass - target_probs`, where `mass` is what the target gives to the head's tokens: all others count
    with probability 0 on both sides, because nothing can be learned about them.
    """
    total, parts = 0.0, (part.split(ROWS_AT_ONCE) for part in (rows, hidden, log_total))
    for some, thought, log_totals in zip(*parts, strict=True):
        with torch.no_grad():
            target_logits = head(thought.to(some.device))
            target_probs = (target_logits - log_totals.to(target_logits)[:, None]).exp()
        logits = head(some)
        with torch.no_grad():
            log_probs = logits.log_softmax(-1)
            total -= share * float((target_probs * log_probs).sum())
            gradient = share * (log_probs.exp() * target_probs.sum(-1, keepdim=True) - target_probs)
        logits.backward(gradient)
    return total


# Recipes and plans

Progress = Callable[[str, int, int, float | None], None]
"""Called with the phase, the number done, the total, and the loss if there is one."""


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """What kind of draft to train, and how. Raises ConfigError for values that cannot be.

    The draft's head covers the `head_tokens` most frequent tokens (0: all). The target answers `chunk_prompts` prompts
    at a time, with at most `answer_tokens` tokens at `temperature`. A step learns `batch_texts` texts.
    """

    kind: ClassVar[str]
    """What is trained, in words."""

    rounds: ClassVar[int] = 1
    """Later rounds also learn from texts of the draft."""

    head_tokens: int = 8192
    temperature: float = 1.0
    answer_tokens: int = 128
    chunk_prompts: int = 16
    batch_texts: int = 4
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, [("temperature", self.temperature > 0.0, "must be greater than 0")])

    @abstractmethod
    def teacher(self, target: PreTrainedModel) -> Teacher:
        """What makes the lessons. Raises ConfigError or UnsupportedError for a target without such drafts."""

    @abstractmethod
    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """The draft as it is before the first step; `head_tokens` None is the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Planned work: pieces of the target's answers, pieces of the given completions at most, and training steps.

    The steps are those of all `rounds`; each round but the first adds `rollouts` pieces of the draft's own texts.
    """

    chunks: int
    completions: int
    steps: int
    rounds: int = 1
    rollouts: int = 0

    @classmethod
    def of(cls, minutes: float, rounds: int, chunk_seconds: float, step_seconds: float) -> Self:
        """About `minutes` of work, given the seconds that a piece of collecting and a training step take.

        Training keeps its share of the time even if the first piece of collecting took longer than its own.
        """
        seconds, later = 60.0 * minutes, rounds - 1
        chunks = max(1, int(COLLECTING_SHARE * seconds / chunk_seconds / (1 + later / ROLLOUT_SHARE)))
        rollouts = max(1, chunks // ROLLOUT_SHARE) if later else 0
        left = max(seconds - (chunks + later * rollouts) * chunk_seconds, (1 - COLLECTING_SHARE) * seconds)
        return cls(chunks, chunks, rounds * max(1, int(left / step_seconds / rounds)), rounds, rollouts)

    def steps_of(self, number: int) -> range:
        """The steps of a round."""
        return range(number * self.steps // self.rounds, (number + 1) * self.steps // self.rounds)


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A finished draft, the work that went into it, and the number of target tokens it learned from."""

    draft: PreTrainedModel
    plan: Plan
    num_tokens: int


class Training:
    """One training of a draft for `target` in the folder `out`.

    The draft learns from the target's answers to `prompts` and from earlier `completions`. `announce` is called once,
    before the training proper starts, with what it will cost. A checkpoint is written every `checkpoint_steps` steps
    and at the end of a round. Lessons lie in `out` until it ends. Raises UnsupportedError if no draft can be trained on
    the target, ConfigError if `out` holds a different training.
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
        self._target, self._tokenizer, self._prompts, self._recipe = target, tokenizer, prompts, recipe
        self._completions, self._out, self._work = completions, out, out / WORK_FOLDER
        self._progress, self._announce, self._checkpoint_steps = progress, announce, checkpoint_steps
        self._teacher = recipe.teacher(target)
        self._asked = {
            "kind": recipe.kind, "target": embeddings_fingerprint(target) + layers_fingerprint(target),
            "texts": fingerprint_of([*prompts, *(text.token_ids for text in completions)]),
        } | dataclasses.asdict(recipe)  # fmt: skip

    def run(self, work: float | Plan) -> TrainedDraft:
        """Train for about `work` minutes, or by the plan `work`, or resume; saves and returns the draft."""
        plan = self._begun(work)
        shards = [*self._answers(plan.chunks), *self._read_completions(plan.completions)]
        student, learned = self._student(shards), _lessons_of(shards)
        own, done = learned, restore_checkpoint(self._work, student)
        for number in range(plan.rounds):
            if number:
                learned = learned + _lessons_of(self._rollouts(student, own, plan.rollouts, number))
            steps = plan.steps_of(number)
            for step in range(max(done, steps.start), steps.stop):
                batch = self._batch(learned, step - steps.start, number)
                self._progress("training", step + 1, plan.steps, student.step(batch, step, plan.steps))
                if (step + 1) % self._checkpoint_steps == 0 or step + 1 == steps.stop:
                    save_checkpoint(self._work, student, step + 1)
        draft = student.save(self._out)
        shutil.rmtree(self._work)
        return TrainedDraft(draft, plan, sum(shard.num_tokens for shard in shards))

    def _begun(self, work: float | Plan) -> Plan:
        """The plan of the training in the folder, checked, or a new one."""
        found = read_plan(self._work)
        if found is not None:
            check_same(found["asked"], self._asked)
            return Plan(**found["plan"])
        for piece in self._work.glob("*.safetensors*"):
            piece.unlink()  # written before there was a plan, by an unknown recipe
        plan = work if isinstance(work, Plan) else self._planned(work)
        save_json(self._work / PLAN_FILE, {"asked": self._asked, "plan": dataclasses.asdict(plan)})
        return plan

    def _planned(self, minutes: float) -> Plan:
        """Plan for so many minutes by timing a first piece of work on this machine; its texts are kept."""
        started = perf_counter()
        shards = self._answers(1)
        chunk_seconds = perf_counter() - started
        student, lessons = self._student(shards), _lessons_of(shards)
        started = perf_counter()
        for step in range(STEPS_TIMED):
            student.step(self._batch(lessons, step, 0), step, STEPS_TIMED)
        step_seconds = (perf_counter() - started) / STEPS_TIMED
        plan = Plan.of(minutes, self._recipe.rounds, chunk_seconds, step_seconds)
        self._announce(self._cost_of(plan, chunk_seconds, step_seconds))
        return plan

    def _cost_of(self, plan: Plan, chunk_seconds: float, step_seconds: float) -> str:
        """What a plan costs, in words."""
        size, rollouts = self._recipe.chunk_prompts, (plan.rounds - 1) * plan.rollouts
        chunks = plan.chunks + min(plan.completions, -(-len(self._completions) // size)) + rollouts
        minutes = (chunks * chunk_seconds + plan.steps * step_seconds) / 60
        megabytes = chunks * self._path("answers", 0).stat().st_size / 1e6
        of_the_draft = f"{rollouts * size} of the draft, " if rollouts else ""
        return (
            f"about {minutes:.0f} minutes: {plan.chunks * size} answers of the target, {of_the_draft}{plan.steps} "
            f"steps, {megabytes:.0f} MB in {self._work} until it ends"
        )

    # Texts to learn from

    def _answers(self, chunks: int) -> list[Shard]:
        """The target's answers to the prompts, cycling through these as often as needed."""
        recipe, size = self._recipe, self._recipe.chunk_prompts

        def texts(author: Author, index: int) -> list[Text]:
            places = range(index * size, (index + 1) * size)
            contexts = [self._prompts[place % len(self._prompts)] for place in places]
            return author.texts(contexts, [recipe.seed + place for place in places], recipe.answer_tokens)

        return self._written("answers", range(chunks), lambda: self._target, texts)

    def _rollouts(self, student: Student, own: Sequence[Lesson], chunks: int, number: int) -> list[Shard]:
        """On-policy lessons: the draft continues the target's answers from random places; the target scores them."""
        recipe, size = self._recipe, self._recipe.chunk_prompts

        def texts(author: Author, index: int) -> list[Text]:
            random = np.random.default_rng([recipe.seed, FROM_DRAFT, index])
            chosen = [own[place].text for place in random.integers(len(own), size=size)]
            contexts = [_cut(text, float(random.random())) for text in chosen]
            seeds = [FROM_DRAFT + index * size + place for place in range(size)]
            return author.texts(contexts, seeds, recipe.answer_tokens // 2)

        indices = range((number - 1) * chunks, number * chunks)
        return self._written("rollouts", indices, lambda: student.save(self._work / "draft"), texts)

    def _read_completions(self, chunks: int) -> list[Shard]:
        """The target's earlier completions, as many as planned."""
        size = self._recipe.chunk_prompts
        kept = self._completions[: chunks * size]
        indices = range(-(-len(kept) // size))
        return self._shards("completions", indices, lambda index: kept[index * size : (index + 1) * size])

    def _written(
        self,
        phase: str,
        indices: range,
        writer: Callable[[], PreTrainedModel],
        texts: Callable[[Author, int], Sequence[Text]],
    ) -> list[Shard]:
        """Shards of texts that a model writes."""
        if all(self._path(phase, index).is_file() for index in indices):
            return [Shard.load(self._path(phase, index)) for index in indices]
        with closing(Author(writer(), self._tokenizer, self._recipe.temperature)) as author:
            return self._shards(phase, indices, lambda index: texts(author, index))

    def _shards(self, phase: str, indices: range, texts: Callable[[int], Sequence[Text]]) -> list[Shard]:
        """Shards from their files; missing ones are read by the target and saved. Progress counts texts."""
        size = self._recipe.chunk_prompts
        for index in indices:
            if not self._path(phase, index).is_file():
                self._progress(phase, size * (index - indices.start), size * len(indices), None)
                self._teacher.shard(texts(index)).save(self._path(phase, index))
        return [Shard.load(self._path(phase, index)) for index in indices]

    def _path(self, phase: str, index: int) -> Path:
        return self._work / f"{phase}-{index:04}.safetensors"

    # Learning

    def _student(self, shards: Sequence[Shard]) -> Student:
        count, frequencies = self._recipe.head_tokens, torch.stack([shard.frequencies for shard in shards]).sum(0)
        always = end_token_ids(self._target, self._tokenizer)
        ids = most_frequent(frequencies, count, always) if 0 < count < frequencies.numel() else None
        return self._recipe.student(self._target, ids)

    def _batch(self, lessons: Sequence[Lesson], step: int, number: int) -> list[Lesson]:
        """The lessons of a round's step: each once per epoch, in an order of seed, round and epoch alone."""
        if not lessons:
            raise PromptError("the target's answers hold nothing to learn from: give other prompts, or completions")
        count, size = len(lessons), self._recipe.batch_texts
        found = []
        for place in range(step * size, (step + 1) * size):
            order = np.random.default_rng([self._recipe.seed, number, place // count]).permutation(count)
            found.append(lessons[int(order[place % count])])
        return found


def _lessons_of(shards: Sequence[Shard]) -> list[Lesson]:
    return [lesson for shard in shards for lesson in shard.lessons if lesson.anchors]


def most_frequent(frequencies: Tensor, count: int, always: frozenset[int]) -> Tensor:
    """The ids of the `count` tokens with most mass and of those `always` kept, ascending; ties prefer the lower id."""
    order = torch.sort(frequencies, descending=True, stable=True).indices[:count]
    return torch.tensor(sorted({*order.tolist(), *always}))


def _cut(text: Text, place: float) -> Prompt:
    """Cut a text at the relative `place` within its learned tokens."""
    return text.token_ids[: text.num_context_tokens + text.places[int(place * len(text.places))]]


# What lies in the folder of a training


def read_plan(folder: Path) -> dict[str, Any] | None:
    """What a training in a folder was begun with, None if there is none. Raises ConfigError if it cannot be read."""
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"asked": dict(found["asked"]), "plan": dict(found["plan"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}); start again in another folder") from error


def check_same(
    begun: Mapping[str, Any],
    asked: Mapping[str, Any],
    advice: str = "resume it with the same settings, or start another one in a new folder",
) -> None:
    """Raise ConfigError, naming the first difference, unless what was begun is what is asked for."""
    for name, given in json.loads(json.dumps(asked)).items():
        if begun.get(name) != given:
            raise ConfigError(
                f"the training in this folder has another {name} ({begun.get(name)} there, {given} now); {advice}"
            )


def save_checkpoint(folder: Path, student: Student, step: int) -> None:
    """Replace the last checkpoint with the state after `step` steps."""
    save_tensors(folder / CHECKPOINT_FILE, student.state(), step=str(step))


def restore_checkpoint(folder: Path, student: Student) -> int:
    """Restore the student from the last checkpoint; returns its number of steps, 0 without a checkpoint."""
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        return 0
    try:
        with safe_open(path, framework="pt") as opened:
            student.restore({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # not a mapping
            return int(opened.metadata()["step"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}); delete it to start the training again") from error
