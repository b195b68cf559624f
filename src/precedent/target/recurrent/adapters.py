"""Lets transformers' recurrent modules compute the rows of a step: their own forward, with our functions in it.

A module keeps its projections, gates and norms. Only the convolution and the recurrence inside it are replaced: its
forward is bound anew with `functions` in place of transformers' functions of the same names. Nothing outside the model
changes, and outside of our forwards the module computes as it always did.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import CellType, FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from precedent.runtime.patched_modules import is_swapped, swapped_class
from precedent.target.recurrent.chains import run_chain
from precedent.target.recurrent.functions import FUNCTIONS
from precedent.target.recurrent.modules import OWN_FORWARDS
from precedent.target.recurrent.step import running_step

TAKES_WINDOW, TAKES_STATE = "update_conv_state", "update_recurrent_state"
"""The calls by which a module hands its state to transformers' cache."""

OWN_CACHES = ("MiniMaxCache",)
"""Cache classes that some models insist on; ours takes their place."""

PLACE = "recurrent_place"
"""The attribute of an adapted module that tells its layer, and its index among the layer's modules."""


def adapt(model: PreTrainedModel) -> list[str]:
    """Adapt all recurrent modules of a model; returns the class names of those that only follow chains."""
    places: dict[int, int] = {}
    chains = set[str]()
    for name, module in model.named_modules():
        forward = _forward_for(module)
        if forward is None:
            continue
        layer = int(next(iter(re.findall(r"\.(\d+)\.", f".{name}.")), 0))
        places[layer] = places.get(layer, -1) + 1
        setattr(module, PLACE, (layer, places[layer]))
        if forward is run_chain:
            chains.add(_original(module).__name__)
        if not is_swapped(module):
            original: Any = type(module)
            module.__class__ = _adapted(original, forward)
    return sorted(chains)


def _original(module: nn.Module) -> Any:
    original: type[nn.Module] = getattr(type(module), "swapped_from", type(module))
    return original


def _forward_for(module: nn.Module) -> Callable[..., Any] | None:
    """What a module computes in our steps; None for a module that is not recurrent."""
    original = _original(module)
    if original.__name__ in OWN_FORWARDS:
        return OWN_FORWARDS[original.__name__]
    names = _names(original)
    if names & set(OWN_CACHES):
        return _without_own_cache(original)
    if not names & {TAKES_WINDOW, TAKES_STATE}:
        return None
    windows = TAKES_WINDOW not in names or "causal_conv1d_fn" in names
    scans = TAKES_STATE not in names or bool(names & (FUNCTIONS.keys() - {"causal_conv1d_fn"}))
    return _with_our_functions(original) if windows and scans else run_chain


@cache
def _names(original: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


@cache
def _with_our_functions(original: Any) -> Callable[..., Any]:
    return rebound(original.forward, FUNCTIONS)


@cache
def _without_own_cache(original: Any) -> Callable[..., Any]:
    return rebound(original.forward, dict.fromkeys(OWN_CACHES, Cache))


@cache
def _adapted(original: Any, ours: Callable[..., Any]) -> type[nn.Module]:
    def forward(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return original.forward(module, *args, **kwargs)
        step.inside(getattr(module, PLACE))
        return ours(module, *args, **kwargs)

    return swapped_class(original, forward)


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
