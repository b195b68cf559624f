"""Quantised checkpoints: what their config says, and whether the weights stay packed in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from precedent.target.fingerprints import is_dense

GPU_ONLY = {"fp8": (8, 9), "mxfp4": (7, 5)}
"""Methods whose kernels need a GPU of this compute capability; transformers dequantises their weights elsewhere."""

UNPACKED_BY_FIRST_FORWARD = "compressed-tensors"
"""The method whose package unpacks all weights at the first forward."""

PACKAGES = {
    "torchao": "torchao", "compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes",
    "gptq": "gptqmodel", "awq": "gptqmodel", "hqq": "hqq", "quanto": "optimum", "aqlm": "aqlm", "eetq": "eetq",
    "vptq": "vptq", "auto-round": "auto_round", "spqr": "spqr_quant", "fp_quant": "fp_quant", "quark": "quark",
    "fp8": "accelerate", "fbgemm_fp8": "fbgemm_gpu", "mxfp4": "accelerate", "bitnet": "accelerate",
}  # fmt: skip
"""The package that transformers needs to load weights of a method."""

DISTRIBUTIONS = {
    "compressed_tensors": "compressed-tensors", "optimum": "optimum-quanto", "auto_round": "auto-round",
    "spqr_quant": "spqr-quant", "fp_quant": "fp-quant", "quark": "amd-quark", "fbgemm_gpu": "fbgemm-gpu",
}  # fmt: skip
"""Names under which pip installs some of them."""

log = logging.getLogger(__name__)


def quant_method(config: Any) -> str | None:
    """The method with which a checkpoint's weights are quantised, as its config names it; None if they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    found = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    return str(getattr(found, "value", found) or "unknown")


def loads_dense(method: str, device: torch.device) -> bool:
    """Whether weights of a method will be dequantised on a device: to the size of a model that was never quantised."""
    if method == UNPACKED_BY_FIRST_FORWARD:
        return True
    needed = GPU_ONLY.get(method)
    return needed is not None and (device.type != "cuda" or torch.cuda.get_device_capability(device) < needed)


def say_if_dense(model: nn.Module, method: str, source: object) -> None:
    """Log a warning if the weights of a quantised checkpoint do not stay packed in memory."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    dense = all(is_dense(getattr(linear, "weight", None)) for linear in linears)
    if not dense and method != UNPACKED_BY_FIRST_FORWARD:
        return
    size = 2 * sum(linear.in_features * linear.out_features for linear in linears)
    how = "were dequantised when they were loaded" if dense else "are unpacked by its package at the first forward"
    log.warning("the %s weights in %s %s: they take %.1f GB of memory", method, source, how, size / 1e9)
