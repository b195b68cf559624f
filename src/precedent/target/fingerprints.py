"""Which model this is: fingerprints for the drafts trained for it, and what kept keys and values depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import binding
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.instructions import FEATURES
from precedent.runtime.stored_tensors import stored_tensors
from precedent.target.quantised import QuantisedWeight

if TYPE_CHECKING:
    from precedent.target.model import TargetModel

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


def is_dense(weight: Any) -> bool:
    """Whether a weight is a plain tensor of floating-point numbers, and not packed by a quantiser."""
    plain = isinstance(weight, Tensor) and type(weight) in (Tensor, nn.Parameter)
    return plain and weight.is_floating_point() and weight.dtype.itemsize > 1


def _rounded(values: Tensor) -> bytes:
    """Values as bfloat16, in which all precisions of one weight agree."""
    return values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()


PACKAGES = ("precedent-llm", "torch", "transformers", "numba", "llvmlite")
"""Packages whose code computes keys and values."""

HASHING_THREADS = 4


def identity_of(target: TargetModel) -> dict[str, Any]:
    """Weights, settings, versions, processor and kernels: equal only if the same tokens get the same keys and values.

    Reads all weights once. Raises UnsupportedError for a model whose weights cannot be read, or are not all of it.
    """
    model = target.model
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError("keep_prefixes=True does not support adapters: merge them into the weights")
    return {
        "weights": weights_digest(target.weights()),
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "attention": model.config._attn_implementation,
        "bitwise": target.bitwise,
        "accurate": sum(getattr(module, "accurate", False) for module in model.modules()),
        "fixed sizes": target.arena is not None,
        "stored": repr(target.kv_shape),
        **({} if target.runner.outputs is None else {"layers read": target.runner.outputs.numbers}),
        "versions": {package: version(package) for package in PACKAGES},
        "machine": _machine(target.device),
    }


def weights_digest(weights: Mapping[str, Any]) -> str:
    """A digest of every byte of a state dict. Raises UnsupportedError, naming a weight that cannot be read."""
    names = sorted(weights)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:  # hashing releases the GIL
        digests = list(threads.map(lambda name: _digest(name, weights[name]), names))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(name: str, weight: Any) -> bytes:
    hashed = hashlib.sha256(f"{name} {getattr(weight, 'dtype', '')} {getattr(weight, 'shape', '')}".encode())
    if isinstance(weight, QuantisedWeight):
        hashed.update(weight.kind.encode() + np.ascontiguousarray(weight.stored).data)
        weight.release()
        return hashed.digest()
    if not isinstance(weight, torch.Tensor):
        hashed.update(repr(weight).encode())
        return hashed.digest()
    for stored in stored_tensors(weight):
        hashed.update(f"{stored.dtype} {tuple(stored.shape)}".encode())
        try:
            hashed.update(stored.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError) as error:  # offloaded, or of a type without bytes
            raise UnsupportedError(
                f"keep_prefixes=True is not available for this model: the bytes of {name} cannot be read"
            ) from error
    return hashed.digest()


def _machine(device: torch.device) -> list[str]:
    found = [device.type, platform.machine(), binding.get_host_cpu_name()]
    found += [FEATURES.flatten(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        found += [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    return found
