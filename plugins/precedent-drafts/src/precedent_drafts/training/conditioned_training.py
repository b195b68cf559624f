"""Trains a conditioned draft: a chain that also reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from precedent.config import check_fields
from precedent.errors import ConfigError
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent.target.load.first_layers import layers_of
from precedent_drafts.conditioned import FUSIONS, LINEAR
from precedent_drafts.kinds import TRAINED
from precedent_drafts.trained import DraftSettings, save_draft
from precedent_drafts.training.block_lessons import BlockLesson, BlockShard, BlockTeacher
from precedent_drafts.training.conditioned_student import ConditionedStudent, Passes, check_passes
from precedent_drafts.training.lesson_plan import common_checks
from precedent_drafts.training.lesson_training import LessonTraining
from precedent_drafts.training.schedule import STARTS, initial_layers


@dataclass(frozen=True, slots=True)
class ConditionedRecipe:
    """How to train a conditioned draft.

    `num_layers` layers start as copies of the target's (`start`), behind a `fusion` of embeddings and hidden states;
    the head covers the `head_tokens` most frequent tokens (0: all). It learns in `passes` passes over each text; with
    `mask_top_k` a token counts in a later pass only if the pass before had it among so many likeliest ones. `feature`
    weighs the distance of hidden states. A step learns `batch_texts` texts, each with at most `context_tokens` tokens
    of context. Raises ConfigError if a value is out of range.
    """

    num_layers: int = 1
    start: str = "ends"
    fusion: str = LINEAR
    passes: int = 3
    mask_top_k: int = 0
    feature: float = 1.0
    head_tokens: int = 8192
    context_tokens: int = 256
    temperature: float = 1.0
    answer_tokens: int = 128
    chunk_prompts: int = 16
    batch_texts: int = 4
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("num_layers", 1 <= self.num_layers <= 3, "must be 1, 2 or 3"),
            ("start", self.start in STARTS, f"must be {', '.join(STARTS)}"),
            ("fusion", self.fusion in FUSIONS, f"must be {' or '.join(FUSIONS)}"),
            ("passes", 1 <= self.passes <= 8, "must lie between 1 and 8"),
            ("mask_top_k", self.mask_top_k >= 0, "must be 0 (no mask) or a number of tokens"),
            ("feature", self.feature >= 0, "must be 0 or more"),
            ("context_tokens", self.context_tokens >= 1, "must be 1 or more"),
        )
        check_fields(self, (*checks, *common_checks(self)))
        if self.mask_top_k and self.passes == 1:
            raise ConfigError("mask_top_k leaves tokens out of later passes, and passes=1 has none: give more passes")


class ConditionedTraining(LessonTraining[ConditionedRecipe, ConditionedStudent]):
    """One training of a conditioned draft. Raises UnsupportedError for a target with other than full attention."""

    kind = "chain that reads its target"

    def _teacher(self) -> BlockTeacher:
        check_passes(self._target)
        return BlockTeacher(self._target, None, self._recipe.context_tokens)

    def _student(self, shards: Sequence[BlockShard]) -> ConditionedStudent:
        recipe = self._recipe
        begin = initial_layers(recipe.start, recipe.num_layers, len(layers_of(self._target)))
        passes = Passes(recipe.passes, recipe.mask_top_k, recipe.feature)
        return ConditionedStudent(
            self._target, begin, self._head_tokens(shards), recipe.fusion, passes, recipe.learning_rate, recipe.seed
        )

    def _step(self, student: ConditionedStudent, lessons: Sequence[BlockLesson], step: int, all_steps: int) -> float:
        return student.step(lessons, step / all_steps)

    def _saved(self, student: ConditionedStudent) -> PreTrainedModel:
        settings = DraftSettings(
            target=name_of(self._target),
            embeddings=embeddings_fingerprint(self._target),
            layers=layers_fingerprint(self._target),
            initial_layers=student.initial_layers,
            num_head_tokens=student.head_tokens.numel(),
            fusion=self._recipe.fusion,
        )
        save_draft(self._out, settings, student.weights())
        return TRAINED.load(self._out, self._target)
