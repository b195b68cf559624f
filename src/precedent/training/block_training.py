"""Trains a block draft from beginning to end: the target answers prompts and reads texts, the draft learns, is saved.

As in `distil`, whatever depends on the clock is fixed in a plan beforehand, each finished piece of work is saved
atomically, and a killed training resumes and ends with the same draft.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.engine.checks import end_token_ids
from precedent.errors import PromptError
from precedent.target.block.draft import BlockDraft, save_block_draft
from precedent.target.block.settings import BlockSettings
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent.target.load.first_layers import layers_of
from precedent.training.block_lessons import BlockLesson, BlockShard, BlockTeacher
from precedent.training.block_recipe import BegunBlock, BlockPlan, BlockRecipe
from precedent.training.block_student import BlockStudent, initial_layers
from precedent.training.distil import STEPS_TIMED, WORK_FOLDER, Progress, check_trainable, most_frequent
from precedent.training.prompts import Prompt, fingerprint_of
from precedent.training.schedule import CHECKPOINT_STEPS, restore_checkpoint, save_checkpoint
from precedent.training.teacher import Author
from precedent.training.texts import Text


@dataclass(frozen=True, slots=True)
class TrainedBlock:
    """A finished block draft, the work that went into it, and the number of target tokens it learned from."""

    draft: BlockDraft
    plan: BlockPlan
    num_tokens: int


class BlockTraining:
    """One training of a block draft for `target` in the folder `out`.

    The draft learns from the target's answers to `prompts` and from earlier `completions`. `announce` is called once,
    before the training proper starts, with what it will cost. Raises UnsupportedError if no draft can be trained on the
    target, ConfigError if `out` holds a different training.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        recipe: BlockRecipe,
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
        self._reads = recipe.reads(len(layers_of(target)))

    def run(self, work: float | BlockPlan) -> TrainedBlock:
        """Train for about `work` minutes, or by the plan `work`, or resume; saves and returns the draft."""
        plan = self._begun(work)
        shards = [*self._answers(plan.chunks), *self._read_completions(plan.completions)]
        lessons = [lesson for shard in shards for lesson in shard.lessons if lesson.anchors]
        if not lessons:
            raise PromptError("the target's answers hold nothing to learn from: give other prompts, or completions")
        student = self._student(shards)
        for step in range(restore_checkpoint(self._work, student), plan.steps):
            loss = self._step(student, lessons, step, plan.steps)
            self._progress("training", step + 1, plan.steps, loss)
            if (step + 1) % self._checkpoint_steps == 0 or step + 1 == plan.steps:
                save_checkpoint(self._work, student, step + 1)
        dtype = torch.float32 if self._target.dtype == torch.float64 else self._target.dtype
        save_block_draft(self._out, student.draft, dtype)
        shutil.rmtree(self._work)
        return TrainedBlock(student.draft, plan, sum(shard.num_tokens for shard in shards))

    def _begun(self, work: float | BlockPlan) -> BlockPlan:
        """The plan of the training in the folder, checked, or a new one."""
        target = embeddings_fingerprint(self._target) + layers_fingerprint(self._target)
        texts = fingerprint_of([*self._prompts, *(text.token_ids for text in self._completions)])
        found = BegunBlock.read(self._work)
        if found is not None:
            found.check_same(target, texts, self._recipe)
            return found.plan
        for piece in self._work.glob("*.safetensors*"):
            piece.unlink()  # written before there was a plan, by an unknown recipe
        plan = work if isinstance(work, BlockPlan) else self._planned(work)
        BegunBlock(target, texts, self._recipe, plan).write(self._work)
        return plan

    def _planned(self, minutes: float) -> BlockPlan:
        """Plan for so many minutes by timing a first piece of work on this machine; its texts are kept."""
        started = perf_counter()
        shards = self._answers(1)
        chunk_seconds = perf_counter() - started
        student, lessons = self._student(shards), [lesson for lesson in shards[0].lessons if lesson.anchors]
        if not lessons:
            raise PromptError("the target's first answers are empty: give other prompts")
        started = perf_counter()
        for step in range(STEPS_TIMED):
            self._step(student, lessons, step, STEPS_TIMED)
        plan = BlockPlan.of(minutes, chunk_seconds, (perf_counter() - started) / STEPS_TIMED)
        self._announce(self._cost_of(plan, chunk_seconds, (perf_counter() - started) / STEPS_TIMED))
        return plan

    def _cost_of(self, plan: BlockPlan, chunk_seconds: float, step_seconds: float) -> str:
        """What a plan costs, in words."""
        size = (self._work / "answers-0000.safetensors").stat().st_size
        read = min(plan.completions, -(-len(self._completions) // self._recipe.chunk_prompts))
        minutes = ((plan.chunks + read) * chunk_seconds + plan.steps * step_seconds) / 60
        return (
            f"about {minutes:.0f} minutes: {plan.chunks * self._recipe.chunk_prompts} answers of the target, "
            f"{plan.steps} steps, {(plan.chunks + read) * size / 1e6:.0f} MB in {self._work} until it ends"
        )

    # Texts to learn from

    def _answers(self, chunks: int) -> list[BlockShard]:
        """The target's answers to the prompts, cycling through these as often as needed."""
        size, paths = (
            self._recipe.chunk_prompts,
            [self._work / f"answers-{index:04}.safetensors" for index in range(chunks)],
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
        paths = [self._work / f"completions-{index:04}.safetensors" for index in range(-(-len(kept) // size))]
        return self._shards("reading completions", paths, lambda index: kept[index * size : (index + 1) * size])

    def _shards(self, phase: str, paths: Sequence[Path], texts: Callable[[int], Sequence[Text]]) -> list[BlockShard]:
        """Shards from their files; missing ones are read by the target and saved."""
        teacher = BlockTeacher(self._target, self._reads, self._recipe.context_tokens)
        for index, path in enumerate(paths):
            if not path.is_file():
                self._progress(phase, index, len(paths), None)
                teacher.shard(texts(index)).save(path)
        return [BlockShard.load(path) for path in paths]

    # Learning

    def _student(self, shards: Sequence[BlockShard]) -> BlockStudent:
        recipe, frequencies = self._recipe, torch.stack([shard.frequencies for shard in shards]).sum(0)
        count = min(recipe.head_tokens or frequencies.numel(), frequencies.numel())
        ids = most_frequent(frequencies, count, end_token_ids(self._target, self._tokenizer))
        begin = initial_layers(recipe.num_layers, len(layers_of(self._target)))
        return BlockStudent(self._target, self._settings(ids.numel()), ids, begin, recipe.learning_rate, recipe.seed)

    def _settings(self, num_head_tokens: int) -> BlockSettings:
        recipe, config = self._recipe, self._target.config.get_text_config()
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return BlockSettings(
            target=name_of(self._target), embeddings=embeddings_fingerprint(self._target),
            layers=layers_fingerprint(self._target), reads=self._reads, hidden_size=config.hidden_size,
            num_head_tokens=num_head_tokens, intermediate_size=config.intermediate_size, num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)), num_layers=recipe.num_layers,
            block_size=recipe.block_size, context_tokens=recipe.context_tokens, markov_rank=recipe.markov_rank,
            iterations=recipe.iterations, proposes=recipe.proposes,
        )  # fmt: skip

    def _step(self, student: BlockStudent, lessons: Sequence[BlockLesson], step: int, all_steps: int) -> float:
        batch = [lessons[place] for place in _places(len(lessons), step, self._recipe)]
        return student.step(batch, step, step / all_steps, self._recipe.anchors, self._recipe.filled)


def _places(count: int, step: int, recipe: BlockRecipe) -> Iterator[int]:
    """The lessons of a step: each once per epoch, in the order of a shuffle that depends on seed and epoch alone."""
    for place in range(step * recipe.batch_texts, (step + 1) * recipe.batch_texts):
        yield int(np.random.default_rng([recipe.seed, place // count]).permutation(count)[place % count])
