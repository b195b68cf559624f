"""Swap the class of a module for a faster one, which copies and saved files do not have; rebind functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import CellType, FunctionType
from typing import Any

from torch import nn


@cache
def swapped_class(original: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of a module's class with this `forward(original, module, ...)`, pickled under the original's name."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(original, self, *args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        return as_original(self, original)

    body = {"forward": run, "__reduce_ex__": reduced, "__module__": original.__module__, "swapped_from": original}
    return type(original.__name__, (original,), body)


def is_swapped(module: nn.Module) -> bool:
    """Whether the class was swapped already: a model may be prepared twice, and a draft model shares modules."""
    return hasattr(type(module), "swapped_from")


def as_original(module: nn.Module, original: Any, dropped: tuple[str, ...] = ("fused",)) -> tuple[Any, ...]:
    """How `copy` and `pickle` rebuild a swapped module: with its original class, without the attributes `dropped`."""
    state = {name: value for name, value in module.__dict__.items() if name not in dropped}
    return _empty, (original,), state


def _empty(original: Any) -> Any:
    return original.__new__(original)


def rebound(function: Any, replaced: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a function, and of the decorated one inside it, that finds other globals under these names."""
    wrapped = getattr(function, "__wrapped__", None)
    inner = None if wrapped is None else rebound(wrapped, replaced)
    cells = tuple(
        CellType(inner) if inner is not None and cell.cell_contents is wrapped else cell
        for cell in function.__closure__ or ()
    )
    names = {name: value for name, value in replaced.items() if name in function.__globals__}
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
