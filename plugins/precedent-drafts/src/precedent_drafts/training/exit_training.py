"""Trains an exit: an adapter that lets the target's first layers speak for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from precedent.config import check_fields
from precedent.errors import ConfigError
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent.target.load.first_layers import layers_of
from precedent_drafts.early_exit import exit_beside
from precedent_drafts.trained import DraftSettings, save_draft
from precedent_drafts.training.block_lessons import BlockLesson, BlockShard, BlockTeacher
from precedent_drafts.training.exit_student import ExitStudent
from precedent_drafts.training.lesson_plan import common_checks
from precedent_drafts.training.lesson_training import LessonTraining


@dataclass(frozen=True, slots=True)
class ExitRecipe:
    """How to train an exit.

    It stands behind the target's layer `layer`, counted from 1, with a gated unit of `width` and a head for the
    `head_tokens` most frequent tokens (0: all). `layerwise` weighs the distance of hidden states beside the divergence
    of distributions. A step learns `batch_texts` texts. Raises ConfigError if a value is out of range.
    """

    layer: int = 4
    width: int = 1024
    layerwise: float = 1.0
    head_tokens: int = 8192
    temperature: float = 1.0
    answer_tokens: int = 128
    chunk_prompts: int = 16
    batch_texts: int = 8
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("layer", self.layer >= 1, "must be 1 or more"),
            ("width", self.width >= 1, "must be 1 or more"),
            ("layerwise", self.layerwise >= 0, "must be 0 or more"),
        )
        check_fields(self, (*checks, *common_checks(self)))


class ExitTraining(LessonTraining[ExitRecipe, ExitStudent]):
    """One training of an exit. Raises ConfigError for a layer that is not one of the target's before its last."""

    kind = "exit"

    def _teacher(self) -> BlockTeacher:
        last = len(layers_of(self._target)) - 1
        if self._recipe.layer > last:
            raise ConfigError(f"layer={self._recipe.layer}: an exit of this target stands behind layer 1 to {last}")
        return BlockTeacher(self._target, (self._recipe.layer,), context_tokens=0)

    def _student(self, shards: Sequence[BlockShard]) -> ExitStudent:
        recipe = self._recipe
        return ExitStudent(
            self._target, self._head_tokens(shards), recipe.width, recipe.layerwise, recipe.learning_rate, recipe.seed
        )

    def _step(self, student: ExitStudent, lessons: Sequence[BlockLesson], step: int, all_steps: int) -> float:
        return student.step(lessons, step / all_steps)

    def _saved(self, student: ExitStudent) -> PreTrainedModel:
        settings = DraftSettings(
            target=name_of(self._target),
            embeddings=embeddings_fingerprint(self._target),
            layers=layers_fingerprint(self._target),
            initial_layers=(),
            num_head_tokens=student.head_tokens.numel(),
            exit_layer=self._recipe.layer,
        )
        save_draft(self._out, settings, student.weights())
        return exit_beside(self._target, self._recipe.layer, student.weights())
