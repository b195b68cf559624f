"""Fingerprints of a target: a draft is trained for one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.stored_tensors import stored_tensors
from precedent.target.load.weight_files import is_dense
from precedent.target.quantised import QuantisedWeight

SAMPLED_ROWS, SAMPLED_VALUES = 64, 8


def name_of(model: Any) -> str:
    """A readable name of a model: its Hugging Face id, the last part of its path, or its class."""
    name = model.config._name_or_path
    if not name:
        return type(model).__name__
    return Path(name).name if Path(name).exists() else name


def embeddings_fingerprint(target: PreTrainedModel) -> str:
    """Fingerprint of the shapes and some rows of embeddings and head, whatever dtype they were loaded in.

    Raises UnsupportedError if they are packed by a quantiser whose rows cannot be read.
    """
    digest = hashlib.sha256()
    for part in (target.get_input_embeddings(), target.get_output_embeddings()):
        weight: Any = getattr(part, "quantised", None) or getattr(part, "weight", None)
        if isinstance(weight, QuantisedWeight):
            chosen = np.arange(0, weight.out_features, max(1, weight.out_features // SAMPLED_ROWS))
            rows = torch.from_numpy(weight.numbers(chosen))
            digest.update(f"{weight.shape}".encode() + _rounded(rows))
            continue
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
    for place, module in layers.named_modules():
        weight = getattr(module, "quantised", None)
        if isinstance(weight, QuantisedWeight):
            row = torch.from_numpy(weight.numbers(slice(0, 1)))[0]
            digest.update(f"{place}.weight".encode() + _rounded(row[:SAMPLED_VALUES]))
        for name, parameter in module.named_parameters(place, recurse=False):
            for stored in stored_tensors(parameter.detach()):
                digest.update(name.encode() + _rounded(stored.reshape(-1)[:SAMPLED_VALUES]))
    return digest.hexdigest()[:32]


def _rounded(values: Tensor) -> bytes:
    """Values as bfloat16, in which all precisions of one weight agree."""
    return values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
