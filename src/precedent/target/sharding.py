"""The rules of tensor parallelism: which models can be divided, how each part is loaded, what a part still tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig

from precedent.errors import UnsupportedError
from precedent.target.kv.layer_kinds import has_indexers, is_recurrent

SETTING = "distributed_config"
"""The `from_pretrained` argument that makes each process load only its part."""


def divided_by(count: int) -> dict[str, Any]:
    """`from_pretrained` arguments for a model divided among `count` processes by its own `tp_plan`."""
    return {SETTING: DistributedConfig(tp_size=count)}


def check_divisible(config: Any, settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a model, or `from_pretrained` settings, that cannot be divided like that."""
    text, count = config.get_text_config(), settings[SETTING].tp_size
    refused = f"tensor_parallel=True is not available for this {text.model_type}"
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedError(f"{refused}: transformers has no tp_plan for its architecture")
    if heads % count or key_heads % count:
        raise UnsupportedError(
            f"{refused}: {count} processes cannot divide its {heads} query and {key_heads} key/value heads evenly"
        )
    if is_recurrent(text):
        raise UnsupportedError(f"{refused}: the states of its recurrent layers are not divided among processes")
    if has_indexers(text):
        raise UnsupportedError(f"{refused}: what the indexers of its layers choose is not shared among processes")
    if getattr(config, "quantization_config", None) or "quantization_config" in settings:
        raise UnsupportedError(f"{refused}: quantised weights are not divided")
    if "device_map" in settings:
        raise UnsupportedError(
            f"{refused}: device_map places whole layers, and each process holds a part of every layer: leave it out"
        )


def is_divided(model: nn.Module) -> bool:
    """Whether other processes hold parts of a model's weights."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_whole(model: nn.Module) -> None:
    """Raise UnsupportedError for a divided model that was loaded without the processes that run its other parts."""
    if is_divided(model):
        raise UnsupportedError(
            f"this {type(model).__name__} is divided among processes: load it by name, with tensor_parallel=True, "
            "so that the other processes follow"
        )


class Part(NamedTuple):
    """A divided weight as a fingerprint sees it: the shape of the whole weight, the values of this process's part.

    Whether divided by columns or by rows, the first process's part begins as the whole does.
    """

    shape: tuple[int, ...]
    own: Tensor

    def reshape(self, *shape: int) -> Tensor:
        """The values of this process's part."""
        return self.own.reshape(*shape)


def parts(weights: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that can be read without communicating with the other processes."""
    return {
        name: Part(tuple(weight.shape), weight.to_local()) if hasattr(weight, "to_local") else weight
        for name, weight in weights.items()
    }
