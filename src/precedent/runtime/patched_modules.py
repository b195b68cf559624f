"""Modules with a class swapped for a faster one; copies and saved files have the original class."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
    """An empty module; its state follows."""
    return original.__new__(original)
