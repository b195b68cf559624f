"""Which target a draft was trained for: short fingerprints of the weights that it uses, in any precision."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED_ROWS, SAMPLED_VALUES = 64, 8


def name_of(model: PreTrainedModel) -> str:
    """A readable name of a model: its Hugging Face id, the last part of its folder, or its class."""
    name = model.config._name_or_path
    if not name:
        return type(model).__name__
    return Path(name).name if Path(name).is_dir() else name


def embeddings_fingerprint(target: PreTrainedModel) -> str:
    """Fingerprint of the shapes and some rows of embeddings and head, whatever dtype they were loaded in."""
    parts = [target.get_input_embeddings(), target.get_output_embeddings()]
    digest = hashlib.sha256()
    for part in parts:
        weight: Any = part.weight
        step = max(1, weight.shape[0] // SAMPLED_ROWS)
        digest.update(f"{tuple(weight.shape)}".encode() + _rounded(weight.detach()[::step]))
    return digest.hexdigest()[:32]


def layers_fingerprint(target: PreTrainedModel) -> str:
    """Fingerprint of a few values of every weight of the target's layers."""
    layers: Any = target.base_model.layers
    digest = hashlib.sha256()
    for name, weight in layers.named_parameters():
        digest.update(name.encode() + _rounded(weight.detach().reshape(-1)[:SAMPLED_VALUES]))
    return digest.hexdigest()[:32]


def _rounded(values: Tensor) -> bytes:
    """Values as bfloat16, in which all precisions of one weight agree."""
    return values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
