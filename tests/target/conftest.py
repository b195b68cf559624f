"""Fixtures that several tests of the target model share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.saved_models import saved

from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama in bfloat16 and its tokenizer."""
    return saved(tmp_path / "target", tiny_causal_lm(dtype=torch.bfloat16))
