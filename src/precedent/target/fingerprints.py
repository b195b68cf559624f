"""What kept keys and values depend on: weights, settings, versions and the processor."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import binding

from precedent.errors import UnsupportedError
from precedent.runtime.instructions import FEATURES
from precedent.runtime.stored_tensors import stored_tensors
from precedent.target.quantised import QuantisedWeight
from precedent.target.support import GROUP

if TYPE_CHECKING:
    from precedent.target.model import TargetModel

PACKAGES = ("precedent-llm", "torch", "transformers", "numba", "llvmlite")
"""Packages whose code computes keys and values, beside those of the group `precedent.models`."""

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
        "versions": _versions(),
        "machine": _machine(target.device),
    }


def _versions() -> dict[str, str]:
    found = [entry.dist for entry in entry_points(group=GROUP)]
    return {name: version(name) for name in PACKAGES} | {each.name: each.version for each in found if each is not None}


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
