"""Fixtures that several tests of the target model share."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from helpers.saved_models import saved

from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama in bfloat16 and its tokenizer."""
    return saved(tmp_path / "target", tiny_causal_lm(dtype=torch.bfloat16))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter with random weights, for the tiny model in the folder `base` beside it."""
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base", tiny_causal_lm(dtype=torch.float32))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how peft uses it
        wrapped = peft.get_peft_model(tiny_causal_lm(dtype=torch.float32), lora)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"
