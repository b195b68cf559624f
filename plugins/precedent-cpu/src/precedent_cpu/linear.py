"""Linear layers for decoding on a CPU, where a step over a tree costs little more than a single token.

Each product is computed in one of three ways. Processor and number of rows decide which one, never a measurement, so
that rounding is the same in every run:

=================  =============================  ====================  =====================================
weights            processor                      a few rows            more rows (prompts)
=================  =============================  ====================  =====================================
bfloat16           with AMX                       `row_product`, 64     packed for oneDNN, in bfloat16
bfloat16           with AVX-512 bf16              `row_product`, 32     packed for oneDNN, in bfloat16
bfloat16           without                        `row_product`, 64     packed for oneDNN, in float32
float32            any                            `row_product`, 64     packed for oneDNN up to 96, then plain
others             any                            plain                 plain
=================  =============================  ====================  =====================================

`row_product` reads the weight in place and rounds a row alike whatever the number of rows. Packed copies take memory.
Without them `row_product` also does their work, and without `row_product` they do its work.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

from precedent.runtime.instructions import native_bfloat16
from precedent.runtime.onednn import bound_kept_products
from precedent.runtime.patched_modules import as_original
from precedent_cpu.row_products import by_tiles, fits, row_product

log = logging.getLogger(__name__)

MOST_FLOAT32_ROWS = 96
"""Above this, the plain float32 product is as fast as a packed one: its repacking is spread over many rows."""

FEW_ROWS, FEW_ROWS_BESIDE_BFLOAT16 = 64, 32
"""Use `row_product` up to this many rows; if only the vector unit multiplies bfloat16, packed copies win earlier."""

MEMORY_SHARE = 0.25
"""Share of the machine's memory that packed copies may take; a model that needs more gets none."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` with faster products for few rows; made by `pack_linears`, never constructed."""

    _packed: Tensor | None
    _packed_bias: Tensor | None
    _packed_state: tuple[int, int]
    few_rows: int
    """`row_product` computes up to this many rows."""

    def prepare(self, *, packed: bool) -> None:
        """Choose the product for few rows and, if `packed`, make the copy for many."""
        native = _packed_dtype(self) == torch.bfloat16
        fewer = native and not by_tiles(self.weight.dtype, self.in_features)
        self.few_rows = (FEW_ROWS_BESIDE_BFLOAT16 if fewer else FEW_ROWS) if fits(self.weight) else 0
        self._packed, self._packed_bias, self._packed_state = None, None, _state(self.weight)
        if packed:
            self._pack()
        elif self.few_rows and self.weight.dtype == torch.bfloat16 and not native:
            self.few_rows = 1 << 62  # still twice as fast as the plain bfloat16 product on such a processor

    def _pack(self) -> None:
        weight, dtype = self.weight.detach(), _packed_dtype(self)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), 8)
        self._packed_bias = None if self.bias is None else self.bias.detach().to(dtype)
        self._packed_state = _state(self.weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_original(self, nn.Linear, ("few_rows", "_packed", "_packed_bias", "_packed_state"))

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        rows = input.numel() // self.in_features
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype or not rows:
            return super().forward(input)
        if rows <= self.few_rows and fits(self.weight):  # the weight may have been moved or cast since
            bias = None if self.bias is None else self.bias.float()
            product = row_product(input.reshape(rows, self.in_features), self.weight, bias)
        elif self._packed is not None and 1 < rows <= self._most_packed_rows and _packable(self):
            product = self._packed_product(input.reshape(rows, self.in_features), self._packed).to(input.dtype)
        else:
            return super().forward(input)
        return product.view(*input.shape[:-1], self.out_features)

    @property
    def _most_packed_rows(self) -> int:
        return MOST_FLOAT32_ROWS if self.weight.dtype == torch.float32 else 1 << 62

    def _packed_product(self, rows: Tensor, packed: Tensor) -> Tensor:
        if self._packed_state != _state(self.weight):  # loaded, trained or replaced since
            self._pack()
            assert self._packed is not None
            packed = self._packed
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(packed.dtype), packed, self._packed_bias, "none", [], ""
        )
        return product


def pack_linears(model: nn.Module, *, copies: bool = True) -> int:
    """Prepare every plain CPU `nn.Linear` of a model in place and return how many bytes the packed copies take.

    Without `copies` none are made; they serve many rows.

    Parameters, names and state dict stay the same: only the class of the module changes. Makes no copies (returns 0)
    and logs a warning if the processor or the memory does not allow them.
    """
    bound_kept_products()
    linears = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
    needed = sum(module.weight.numel() * _packed_dtype(module).itemsize for module in linears)
    packed = copies and torch.backends.mkldnn.is_available() and needed <= MEMORY_SHARE * _memory_bytes()
    if linears and copies and not packed:
        log.warning("linear layers get no packed copies, which would take %.1f GB: prompts are slower", needed / 1e9)
    for module in linears:
        module.__class__ = PackedLinear
        _as_packed(module).prepare(packed=packed)
    return needed if packed else 0


def _as_packed(module: Any) -> PackedLinear:
    assert isinstance(module, PackedLinear)
    return module


def _packable(module: nn.Linear) -> bool:
    weight: Any = getattr(module, "weight", None)  # packed elsewhere, or of a type that only claims to be bfloat16
    return type(weight) is nn.Parameter and weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16)


def _packed_dtype(module: nn.Linear) -> torch.dtype:
    return torch.bfloat16 if module.weight.dtype == torch.bfloat16 and native_bfloat16() else torch.float32


def _state(weight: Tensor) -> tuple[int, int]:
    """Changes whenever the values of a weight do."""
    return weight.data_ptr(), weight._version


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33
