"""Which target a draft was trained for: short fingerprints of the weights that it uses, in any precision."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.stored_tensors import stored_tensors

SAMPLED_ROWS, SAMPLED_VALUES = 64, 8


def name_of(model: Any) -> str:
    """A readable name of a model: its Hugging Face id, the last part of its folder, or its class."""
    name = model.config._name_or_path
    if not name:
        return type(model).__name__
    return Path(name).name if Path(name).is_dir() else name


def embeddings_fingerprint(target: PreTrainedModel) -> str:
    """Fingerprint of the shapes and some rows of embeddings and head, whatever dtype they were loaded in.

    Raises UnsupportedError if they are quantised: a draft that uses them needs their rows.
    """
    parts = [target.get_input_embeddings(), target.get_output_embeddings()]
    digest = hashlib.sha256()
    for part in parts:
        weight: Any = getattr(part, "weight", None)
        if not is_dense(weight):
            raise UnsupportedError(
                f"{name_of(target)} has quantised embeddings or a quantised head, which a trained draft cannot share: "
                "quantise the layers only (llm_int8_skip_modules, modules_to_not_convert or ignore=['lm_head'])"
            )
        step = max(1, weight.shape[0] // SAMPLED_ROWS)
        digest.update(f"{tuple(weight.shape)}".encode() + _rounded(weight.detach()[::step]))
    return digest.hexdigest()[:32]


def layers_fingerprint(target: PreTrainedModel) -> str:
    """Fingerprint of a few values of every weight of the target's layers."""
    layers: Any = target.base_model.layers
    digest = hashlib.sha256()
    for name, weight in layers.named_parameters():
        for stored in stored_tensors(weight.detach()):
            digest.update(name.encode() + _rounded(stored.reshape(-1)[:SAMPLED_VALUES]))
    return digest.hexdigest()[:32]


def is_dense(weight: Any) -> bool:
    """Whether a weight is a plain tensor of floating-point numbers, and not packed by a quantiser."""
    plain = isinstance(weight, Tensor) and type(weight) in (Tensor, nn.Parameter)
    return plain and weight.is_floating_point() and weight.dtype.itemsize > 1


def _rounded(values: Tensor) -> bytes:
    """Values as bfloat16, in which all precisions of one weight agree."""
    return values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
