"""The target's own first layers as a draft model that shares the target's weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from precedent.errors import ConfigError, UnsupportedError

FIRST_LAYERS = "first-layers:"
"""`first-layers:N` names the target's own first N layers, with its final norm and head, as a draft model."""


def first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """The target's first `count` layers with its embeddings, final norm and head; no weight is copied.

    Raises UnsupportedError for a model that does not keep its layers in `model.layers`, as Llama does.
    """
    prefix, layers = target.base_model_prefix, _layers(target)
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    with torch.device("meta"):  # no memory and no initialisation: every module is replaced by the target's own
        draft = type(target)(config)
    _share_children(target, draft, skip=prefix)
    _share_children(getattr(target, prefix), getattr(draft, prefix), skip="layers")
    getattr(draft, prefix).layers = nn.ModuleList(layers[:count])
    if any(tensor.is_meta for tensor in (*draft.parameters(), *draft.buffers())):
        raise _unsupported(target)
    draft.eval()
    return draft


def layer_count(spec: str, target: PreTrainedModel) -> int:
    """N of `first-layers:N`. Raises ConfigError unless 1 <= N < the target's number of layers."""
    text, most = spec.removeprefix(FIRST_LAYERS), len(_layers(target)) - 1
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise ConfigError(f"draft model {spec!r}: give a number of layers from 1 to {most}, as in {FIRST_LAYERS}1")
    return int(text)


def _share_children(source: nn.Module, sharer: nn.Module, *, skip: str) -> None:
    for name, child in source.named_children():
        if name != skip:
            setattr(sharer, name, child)


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _unsupported(model)
    return layers


def _unsupported(model: PreTrainedModel) -> UnsupportedError:
    return UnsupportedError(
        f"{FIRST_LAYERS}N cannot take the first layers of a {type(model).__name__}; "
        "give a smaller model with the same tokenizer as the draft model"
    )
