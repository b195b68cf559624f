"""Quantised layers of the shapes that torchao and compressed-tensors give them, without these packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing


class Int8Tensor(Tensor):
    """A weight in eight bits that claims another dtype and supports nothing but a linear layer, as torchao's."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor) -> Int8Tensor:
        made: Any = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)
        return made

    def __init__(self, qdata: Tensor, scale: Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8Tensor:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dense(self) -> Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Int8Tensor:
        return cls(parts["qdata"], parts["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            inputs, weight, bias = (*args, None)[:3] if len(args) < 3 else args[:3]
            return nn.functional.linear(inputs, weight.dense(), bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return return_and_correct_aliasing(function, args, kwargs or {}, cls(args[0].qdata, args[0].scale))
        raise NotImplementedError(f"{cls.__name__} dispatch: attempting to run unimplemented operator {function}")


def pack_linear(linear: nn.Linear) -> None:
    """Leave a linear layer without `weight`, as compressed-tensors does, and give it a forward that unpacks."""
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
    packed = (linear.weight.detach() / scale).round().to(torch.int8)
    del linear.weight
    linear.weight_packed = nn.Parameter(packed, requires_grad=False)
    linear.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, linear.weight_packed.to(inputs.dtype) * linear.weight_scale, linear.bias)

    linear.forward = forward  # type: ignore[method-assign]  # as the package does


def with_int8_tensors(model: Any) -> Any:
    """The model with every linear layer's weight in a tensor type of its own."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Tensor.of(module.weight.detach()), requires_grad=False)
    return model


def with_packed_linears(model: Any) -> Any:
    """The model with every linear layer's weight replaced by packed numbers under other names."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            pack_linear(module)
    return model
