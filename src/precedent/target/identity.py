"""What the keys and values of given tokens depend on, so that those of another model or machine are never used."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import torch
from llvmlite import binding

from precedent.errors import UnsupportedError
from precedent.runtime.instructions import FEATURES
from precedent.runtime.stored_tensors import stored_tensors
from precedent.target.model import TargetModel

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
    if not isinstance(weight, torch.Tensor):
        hashed.update(repr(weight).encode())
        return hashed.digest()
    for stored in stored_tensors(weight):
        hashed.update(f"{stored.dtype} {tuple(stored.shape)}".encode())
        hashed.update(_bytes(name, stored))
    return hashed.digest()


def _bytes(name: str, weight: torch.Tensor) -> memoryview:
    try:
        return weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:  # offloaded, or of a type without bytes
        raise UnsupportedError(
            f"keep_prefixes=True is not available for this model: the bytes of {name} cannot be read"
        ) from error


def _machine(device: torch.device) -> list[str]:
    kernels = [FEATURES.flatten(), torch.backends.cpu.get_cpu_capability()]
    found = [platform.machine(), binding.get_host_cpu_name(), *kernels]
    if device.type == "cuda":
        found += [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    return [device.type, *found]
