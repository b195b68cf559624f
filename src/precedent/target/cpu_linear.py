"""Linear layers with weights packed for oneDNN: on a CPU a step over a tree then costs little more than a single token.

The plain product repacks its weight at every call as soon as there is more than one row. Packed once, the same product
runs near the memory's limit. What is packed depends on the processor, never on a measurement, so that rounding is the
same in every run:

=================  =============================  ==========================================================
weights            processor                      rows ≥ 2 (one row always uses the plain product)
=================  =============================  ==========================================================
bfloat16           with AVX-512 bf16 or AMX       packed bfloat16
bfloat16           without                        packed float32, rounded to bfloat16 once at the end
float32            any                            packed float32, up to `MOST_FLOAT32_ROWS` rows
others             any                            plain
=================  =============================  ==========================================================
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

MOST_FLOAT32_ROWS = 96
"""Above this the plain float32 product is as fast, its repacking being spread over many rows."""

MEMORY_SHARE = 0.25
"""Packed copies may take this share of the machine's memory; a larger model keeps its plain products."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` whose product runs on a packed copy of its weight; made by `pack_linears`, never constructed."""

    _packed: Tensor
    _packed_bias: Tensor | None
    _packed_version: int
    _most_rows: int

    def pack(self, dtype: torch.dtype, most_rows: int) -> None:
        """Make the packed copy, in `dtype`."""
        weight = self.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), 8)
        self._packed_bias = None if self.bias is None else self.bias.detach().to(dtype)
        self._packed_version, self._most_rows = weight._version, most_rows

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`; the plain product where packing has nothing to offer."""
        rows = input.numel() // self.in_features
        if not 1 < rows <= self._most_rows or torch.is_grad_enabled():
            return super().forward(input)
        if self.weight._version != self._packed_version:  # loaded or trained meanwhile
            self.pack(self._packed.dtype, self._most_rows)
        flat = input.reshape(rows, self.in_features).to(self._packed.dtype)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self._packed, self._packed_bias, "none", [], "")
        return product.to(input.dtype).reshape(*input.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Pack every plain CPU `nn.Linear` of a model in place and return how many bytes the copies take.

    Parameters, names and state dict stay as they are: only the class of the module changes. Does nothing (returns 0)
    where the processor or the memory does not allow it, and says so once in the log.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
    needed = sum(module.weight.numel() * _packed_dtype(module).itemsize for module in linears)
    if not linears or not torch.backends.mkldnn.is_available():
        return 0
    if needed > MEMORY_SHARE * _memory_bytes():
        log.warning("linear layers stay unpacked: the copies would take %.1f GB", needed / 1e9)
        return 0
    for module in linears:
        dtype = _packed_dtype(module)
        most_rows = MOST_FLOAT32_ROWS if module.weight.dtype == torch.float32 else 1 << 62
        module.__class__ = PackedLinear
        _as_packed(module).pack(dtype, most_rows)
    return needed


def _as_packed(module: Any) -> PackedLinear:
    assert isinstance(module, PackedLinear)
    return module


def _packable(module: nn.Linear) -> bool:
    weight = module.weight  # quantisation may put a tensor of its own kind there, which calls itself bfloat16
    return type(weight) is nn.Parameter and weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16)


def _packed_dtype(module: nn.Linear) -> torch.dtype:
    return torch.bfloat16 if module.weight.dtype == torch.bfloat16 and _native_bfloat16() else torch.float32


def _native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33
