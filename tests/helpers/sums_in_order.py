"""The order of the sums of CPU products, written down plainly in numpy: what the kernels must give, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Singles = NDArray[np.float32]


def product_in_order(rows: Tensor, weight: Tensor, bias: Tensor | None, lanes: int) -> Tensor:
    """`rows [num_rows, length]` times `weight [num_outs, length]`, plus `bias`, rounded once to the weight's dtype.

    Element k is added to lane k modulo `lanes`, from first to last; then the upper half of the lanes is added to the
    lower until one is left.
    """
    left, right = (each.float().numpy()[:, None] for each in (rows, weight))
    sums = np.zeros((len(rows), len(weight), lanes), dtype=np.float32)
    for k in range(0, weight.shape[1], lanes):
        sums = fused(left[..., k : k + lanes], right[:, 0, k : k + lanes], sums)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    total = sums[..., 0] if bias is None else sums[..., 0] + bias.float().numpy()
    return torch.from_numpy(total).to(weight.dtype)


def fused(left: Singles, right: Singles, total: Singles) -> Singles:
    """`left * right + total` of finite float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which a second rounding cannot spoil (Boldo and
    Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    product: Any = left.astype(np.float64) * right
    nearest = product + total
    part = nearest - product
    error = (product - (nearest - part)) + (total - part)
    even = nearest.view(np.int64) % 2 == 0
    odd = np.nextafter(nearest, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, nearest).astype(np.float32)
