"""A target with opinions, small enough for exact tests, and a training of a draft for it that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from precedent_drafts.training.chains import ChainRecipe
from precedent_drafts.training.training import Plan, Recipe, TrainedDraft, Training
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPTS = [tuple(range(first, first + 6)) for first in range(40, 48)]
RECIPE = ChainRecipe(
    layers=1, head_tokens=96, answer_tokens=12, chunk_prompts=8, rounds=2, batch_texts=3, learning_rate=3e-3
)
PLAN = Plan(chunks=2, completions=2, steps=12, rounds=2, rollouts=1)


def tiny_target(seed: int = 0) -> PreTrainedModel:
    """A random Llama of three layers in float64."""
    return tiny_causal_lm(hidden_size=32, scale=1.5, seed=seed)


def train_tiny(
    out: Path,
    recipe: Recipe = RECIPE,
    plan: float | Plan = PLAN,
    target: PreTrainedModel | None = None,
    **settings: Any,
) -> TrainedDraft:
    """Train a draft for `tiny_target()`, or another one, in the folder `out`; `settings` are a Training's."""
    given = {"prompts": PROMPTS} | settings
    return Training(target or tiny_target(), byte_tokenizer(), recipe=recipe, out=out, **given).run(plan)
