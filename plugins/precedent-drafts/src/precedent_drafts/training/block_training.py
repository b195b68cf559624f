"""Trains a block draft: its lessons are outputs of the target's layers, and blocks behind many tokens of each text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from precedent.errors import ConfigError
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent.target.load.first_layers import layers_of
from precedent_drafts.block_draft import BlockDraft, BlockSettings, fill, load_block_draft, save_block_draft
from precedent_drafts.training.block_lessons import BlockLesson, BlockShard, BlockTeacher
from precedent_drafts.training.block_recipe import ENDS, BlockRecipe
from precedent_drafts.training.block_student import BlockStudent, initial_layers
from precedent_drafts.training.lesson_training import LessonTraining


class BlockTraining(LessonTraining[BlockRecipe, BlockStudent]):
    """One training of a block draft."""

    kind = "block draft"

    def _teacher(self) -> BlockTeacher:
        return BlockTeacher(self._target, self._reads, self._recipe.context_tokens)

    @property
    def _reads(self) -> tuple[int, ...]:
        """The layers of the target that the draft reads."""
        return self._recipe.reads(len(layers_of(self._target)))

    def _student(self, shards: Sequence[BlockShard]) -> BlockStudent:
        recipe = self._recipe
        earlier = None if recipe.start == ENDS else load_block_draft(Path(recipe.start).expanduser(), self._target)
        ids = self._head_tokens(shards) if earlier is None else earlier.head.token_ids.cpu()
        begin = initial_layers(recipe.num_layers, len(layers_of(self._target)))
        settings = self._settings(ids.numel())
        student = BlockStudent(self._target, settings, ids, begin, recipe.learning_rate, recipe.seed)
        if earlier is not None:
            if earlier.settings.reads != self._reads:
                raise ConfigError(f"the draft in {recipe.start} reads other layers than {self._reads}: leave start out")
            fill(student.draft, earlier.own_weights(), f"the draft in {recipe.start}")
        return student

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
            iterations=recipe.iterations, proposes=recipe.proposes, condition=recipe.condition,
        )  # fmt: skip

    def _step(self, student: BlockStudent, lessons: Sequence[BlockLesson], step: int, all_steps: int) -> float:
        return student.step(lessons, step, step / all_steps, self._recipe.anchors, self._recipe.filled)

    def _saved(self, student: BlockStudent) -> BlockDraft:
        dtype = torch.float32 if self._target.dtype == torch.float64 else self._target.dtype
        save_block_draft(self._out, student.draft, dtype)
        return load_block_draft(self._out, self._target)
