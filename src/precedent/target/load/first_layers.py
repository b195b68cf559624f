"""Models made of a target's own modules: its first layers, or its embeddings and head around other layers.

`first-layers:N` is the early exit: the target's first N layers with its final norm and head, untrained. Those layers
store the same keys and values as in the target, so the two can share one KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from precedent.errors import ConfigError, UnsupportedError
from precedent.runtime.plain_values import in_one_line
from precedent.target.model import TargetModel

FIRST_LAYERS = "first-layers:"
"""`first-layers:N` names a draft model made of the target's first N layers with its final norm and head."""


def first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """The target's first `count` layers with its embeddings, final norm and head; no weight is copied.

    Raises UnsupportedError for a model whose layers are not in `model.layers`, as Llama's are, or whose class refuses
    to have only these.
    """
    draft, layers = frame_of(target, range(count)), layers_of(target)[:count]
    base_of(draft).layers = nn.ModuleList(layers)
    return whole(draft, target)


def frame_of(target: PreTrainedModel, layer_indices: Sequence[int]) -> PreTrainedModel:
    """A model of the target's class with all of its modules except the layers, which are new, on the meta device.

    Layer i has the kind of the target's layer `layer_indices[i]`. Raises UnsupportedError if the target's class cannot
    have such layers.
    """
    layers_of(target)  # raises UnsupportedError if the layers are elsewhere
    config = copy.deepcopy(target.config)
    kinds = list(getattr(config, "layer_types", None) or ())
    config.num_hidden_layers = len(layer_indices)
    chosen = [kinds[index] for index in layer_indices] if kinds else []
    try:
        if chosen and list(config.layer_types) != chosen:  # it may derive these very kinds from their number
            config.layer_types = chosen
        with torch.device("meta"):  # no memory and no initialisation: every module is replaced
            frame = type(target)(config)
    except (AttributeError, ValueError) as error:
        reason = f"its class refuses {len(layer_indices)} of its layers: {in_one_line(error)}"
        raise _unsupported(target, reason) from error
    for source, sharer, own in ((target, frame, target.base_model_prefix), (base_of(target), base_of(frame), "layers")):
        for name, child in source.named_children():
            if name != own:
                setattr(sharer, name, child)
    frame.eval()
    return frame


def whole(draft: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """The draft, if none of its tensors is still on the meta device. Raises UnsupportedError, naming the target."""
    if any(tensor.is_meta for tensor in (*draft.parameters(), *draft.buffers())):
        raise _unsupported(target, "some of its tensors belong to none of its modules")
    return draft


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """A model's layers. Raises UnsupportedError for a model that does not hold them in `model.layers`."""
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _unsupported(model, "it has no `layers`")
    return layers


def base_of(model: PreTrainedModel) -> Any:
    """The model without its head."""
    return getattr(model, model.base_model_prefix)


def checked_count(spec: str, layers: int) -> int:
    """N of `first-layers:N`. Raises ConfigError unless 1 <= N < `layers`."""
    text, most = spec.removeprefix(FIRST_LAYERS), layers - 1
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise ConfigError(f"draft model {spec!r}: give a number of layers from 1 to {most}, as in {FIRST_LAYERS}1")
    return int(text)


def exits_early(draft: TargetModel, target: TargetModel) -> bool:
    """Whether a draft is the target's own first layers and stores the same keys and values, so needs no own KV."""
    try:
        own, theirs = layers_of(draft.model), layers_of(target.model)
    except UnsupportedError:
        return False
    count = len(own)
    same_layers = count <= len(theirs) and all(one is other for one, other in zip(own, theirs, strict=False))
    own_kv, their_kv = draft.kv_shape.first_layers(count), target.kv_shape.first_layers(count)
    return same_layers and own_kv == their_kv


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"neither the first layers of a {type(model).__name__} nor trained ones can be set between its embeddings and "
        f"its head ({reason}); give a smaller model with the same tokenizer as the draft model"
    )
