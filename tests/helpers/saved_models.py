"""Models saved in folders, what they compute, and errors of one clear line."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.errors import PrecedentError
from precedent_testing.tiny_models import byte_tokenizer

PROMPT = torch.tensor([[5, 7, 11, 13]])


def saved(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits


def assert_one_clear_line(error: PrecedentError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) > 30
