"""A second tree of modules over the same weights, so that our target model can change modules without the user's.

`TargetModel` switches the attention implementation and packs linear layers. On the user's own modules, that would
change the rounding of the user's other calls.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

OWN_TABLES = ("_parameters", "_buffers", "_modules")
"""A module's dictionaries that the twin copies; the tensors in them are shared."""

EVERY_MODULES_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module: parameters are compared separately, the rest changes no result."""

COLLECTIONS = (list, tuple, set, dict)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """Create a model with its own modules and configuration over the same weights; no tensor is copied."""
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        memo[id(module)] = twin
    configs: dict[int, Any] = {}
    for module in modules:
        _make_own(memo[id(module)].__dict__, memo, configs)
    twin_model: PreTrainedModel = memo[id(model)]
    return twin_model


def _make_own(attributes: dict[str, Any], memo: Mapping[int, Any], configs: dict[int, Any]) -> None:
    """Point a twin's attributes to twins; drop compiled code, which belongs to the original."""
    for name in OWN_TABLES:
        attributes[name] = {key: memo.get(id(value), value) for key, value in attributes[name].items()}
    if attributes.get("_compiled_call_impl") is not None:
        attributes["_compiled_call_impl"] = None
    for name, value in attributes.items():
        if name.endswith("config") and hasattr(value, "model_type"):
            attributes[name] = copy.deepcopy(value, configs)  # attention layers read it
        elif isinstance(value, MethodType) and id(value.__self__) in memo:
            attributes[name] = MethodType(value.__func__, memo[id(value.__self__)])
        elif isinstance(value, partial):  # accelerate replaces `forward` this way
            attributes[name] = partial(value.func, *(memo.get(id(a), a) for a in value.args), **value.keywords)


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """A value that changes with the model's weights, modules, adapters or settings; an earlier twin is then stale.

    It does not see weights written through `.data`, which leaves no trace on a tensor.
    """
    modules = [(id(module), type(module), plain_attributes(module)) for module in model.modules()]
    tensors = [_identity(tensor) for tensor in (*model.parameters(), *model.buffers())]
    return (model.config._attn_implementation, modules, tensors)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return (id(tensor), tensor.data_ptr(), version, tensor.dtype, tensor.device)


def plain_attributes(thing: object) -> dict[str, Any]:
    """An object's attributes that are numbers, strings, or short collections of them (copied)."""
    return {
        name: copy.deepcopy(value) if isinstance(value, COLLECTIONS) else value
        for name, value in getattr(thing, "__dict__", {}).items()
        if name not in EVERY_MODULES_OWN and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if not isinstance(value, COLLECTIONS) or len(value) > 16:
        return False
    return all(map(_is_plain, value)) and (not isinstance(value, dict) or all(map(_is_plain, value.values())))
