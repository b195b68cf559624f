"""Root-mean-square norms on a CPU in one call each: transformers uses eight operators, and a model has dozens of norms.

A norm is replaced if it agrees with our kernel on random inputs, whatever its class is called. A row's result does not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from llvmlite import ir
from numba import types
from torch import Tensor, nn

from precedent.runtime.compiled import compiled_callback
from precedent.runtime.patched_modules import is_swapped, swapped_class
from precedent_cpu.kernel_code import FLOAT, FUSED, LANES, Code, by_width


def norm_kernel(*, as_floats: bool) -> Callable[..., None]:
    """A kernel for one row of a root-mean-square norm, `(wide, inputs, weights, length, epsilon, offset, outputs)`.

    It computes in float32 as transformers' models do. With an `offset` of 0 (Llama), bfloat16 is rounded before and
    after the multiplication by the weight. Any other (1 for Gemma) is added to the weight, and bfloat16 is rounded
    once, at the end. With `as_floats`, the rounded result is still written as float32.
    """

    @by_width(*[types.intp] * 3, *[types.float64] * 2, types.intp)
    def norm(
        code: Code, inputs: Any, weights: Any, length: Any, epsilon: Any, offset: Any, outputs: Any, *, wide: bool
    ) -> None:
        builder = code.builder
        scale = code.spread(code.inverse_root(code.squares(inputs, length, wide), length, epsilon))
        added = code.spread(builder.fptrunc(offset, FLOAT))
        rounded_twice = builder.fcmp_ordered("==", offset, ir.Constant(offset.type, 0.0))
        with code.steps(length, ()) as (k, _, _):
            scaled = builder.fmul(code.load(inputs, k, wide=wide), scale)
            scaled = builder.select(rounded_twice, code.rounded(scaled, wide), scaled)
            weight = builder.fadd(code.load(weights, k, wide=wide), added)
            normed = code.rounded(builder.fmul(scaled, weight), wide)
            code.store_lanes(normed, outputs, k, wide or as_floats)

    return norm


FEW_ROWS = 64
"""Above this, torch's operators are as fast, because they use all threads."""

CHECKED_ROWS = 3
"""Rows of random numbers on which a norm must agree with our kernel."""

TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 1e-5}
"""Largest relative difference that rounding may cause: two steps of bfloat16, or the order of a float32 sum."""

OFFSETS = (0.0, 1.0)
"""What norms add to their weights: Llama's and most others nothing, Gemma's one (`norm_kernel`)."""

_norm = norm_kernel(as_floats=False)


def _rows(rows, inputs, weights, length, row_bytes, epsilon, offset, outputs, wide):  # type: ignore[no-untyped-def]
    for row in range(rows):
        _norm(wide != 0, inputs + row * row_bytes, weights, length, epsilon, offset, outputs + row * row_bytes)


def norm_rows(inputs: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    """`inputs [..., length]` over the root of their mean square, times `weight [length] + offset`, in the same dtype.

    `offset` is one of `OFFSETS`.
    """
    inputs, length = inputs.contiguous(), weight.shape[0]
    outputs = torch.empty_like(inputs)
    _entry()(
        inputs.numel() // length, inputs.data_ptr(), weight.data_ptr(), length, length * weight.element_size(),
        epsilon, offset, outputs.data_ptr(), weight.dtype == torch.float32,
    )  # fmt: skip
    return outputs


@cache
def _entry() -> Any:
    """The kernel as machine code, compiled at first use: not at all where nothing runs on a CPU."""
    signature = types.void(*[types.intp] * 5, *[types.float64] * 2, types.intp, types.intp)
    return compiled_callback(_rows, signature).ctypes


def fuse_norms(model: nn.Module) -> int:
    """Let every CPU norm that agrees with `norm_rows` use it; returns how many. Their weights stay in place."""
    count = 0
    for module in model.modules():
        offset = None if is_swapped(module) else offset_of(module)
        if offset is not None:
            original: Any = type(module)
            module.__class__ = swapped_class(original, _FORWARDS[offset])
            count += 1
    return count


def _forward(offset: float, original: Any, norm: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    weight = norm.weight
    few = hidden_states.numel() <= FEW_ROWS * weight.shape[0]
    if args or kwargs or not few or torch.is_grad_enabled() or not _fits(hidden_states, weight):
        return original.forward(norm, hidden_states, *args, **kwargs)
    return norm_rows(hidden_states, weight, epsilon_of(norm), offset)


_FORWARDS = {offset: partial(_forward, offset) for offset in OFFSETS}


def _fits(inputs: Tensor, weight: Tensor) -> bool:
    """Whether `norm_rows` supports these; a model may have been moved or cast since it was examined."""
    return inputs.dtype == weight.dtype and weight.dtype in TOLERANCE and weight.is_cpu and inputs.is_cpu


def epsilon_of(module: Any) -> float:
    """The number that a norm adds to the mean square, whatever its class calls it."""
    found: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return found


@torch.inference_mode()
def offset_of(module: nn.Module) -> float | None:
    """The offset with which `norm_rows` gives a norm's outputs on random rows, up to rounding; None if none does."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight: Any = module.weight
    if not (
        FUSED and weight.is_cpu and weight.dtype in TOLERANCE and weight.dim() == 1 and not weight.shape[0] % LANES
    ):
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(CHECKED_ROWS, weight.shape[0], generator=generator).to(weight.dtype)
    try:
        expected, epsilon = module(rows).float(), epsilon_of(module)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # an unusual norm: it stays as it is
    for offset in OFFSETS:
        found = norm_rows(rows, weight, epsilon, offset).float()
        if torch.allclose(found, expected, rtol=TOLERANCE[weight.dtype], atol=1e-6):
            return offset
    return None
