"""A target with opinions, small enough for exact tests, and a training of a draft for it that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from precedent_drafts.training.distil import Distillation
from precedent_drafts.training.schedule import Recipe, Schedule
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPTS = [tuple(range(first, first + 6)) for first in range(40, 48)]
RECIPE = Recipe(
    num_layers=1, head_tokens=96, answer_tokens=12, chunk_prompts=8, rounds=2, batch_tokens=32, learning_rate=3e-3
)
PLAN = Schedule(chunks=2, completions=2, rollouts=1, rounds=2, steps_per_round=6)


def tiny_target(seed: int = 0) -> PreTrainedModel:
    """A random Llama of three layers in float64."""
    return tiny_causal_lm(hidden_size=32, scale=1.5, seed=seed)


def train_tiny(out: Path, recipe: Recipe = RECIPE, plan: Schedule = PLAN, **settings: Any) -> Path:
    """Train a draft for `tiny_target()` in the folder `out`, which is returned; `settings` are a Distillation's."""
    Distillation(tiny_target(), byte_tokenizer(), PROMPTS, recipe, out, **settings).run(plan)
    return out
