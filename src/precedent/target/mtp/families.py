"""How the families of models that carry an MTP head name its tensors, and what they feed back to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from precedent.errors import ConfigError, UnsupportedError

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Names that configs give to the number of MTP layers."""


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a head's tensors in a checkpoint, and what a second draw reads.

    `layer` begins the names of its decoder layer; `projection`, `embedding_norm`, `hidden_norm` and `norm` are modules,
    each with a `weight`. `copies` begin the names of what repeats the target's own weights. The next draw reads the
    layer's output after `norm` if `feeds_back_normed`, otherwise before it.
    """

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    feeds_back_normed: bool
    copies: tuple[str, ...] = ()

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of all tensors of a head begin with."""
        return self.layer, *(f"{name}." for name in self.modules)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules around the layer."""
        return self.projection, self.embedding_norm, self.hidden_norm, self.norm


def _like_deepseek(num_layers: int) -> Family:
    """A layer more than the model has, with the other modules inside it (vLLM: deepseek_mtp.py, glm4_moe_mtp.py)."""
    layer = f"model.layers.{num_layers}."
    return Family(
        layer,
        projection=f"{layer}eh_proj",
        embedding_norm=f"{layer}enorm",
        hidden_norm=f"{layer}hnorm",
        norm=f"{layer}shared_head.norm",
        feeds_back_normed=False,
        copies=(f"{layer}embed_tokens.", f"{layer}shared_head.head."),
    )


def _like_qwen(num_layers: int) -> Family:
    """Modules of their own below `mtp` (vLLM: qwen3_next_mtp.py, qwen3_5_mtp.py)."""
    return Family(
        "mtp.layers.0.",
        projection="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
        feeds_back_normed=True,
    )


FAMILIES = {
    "deepseek_v3": _like_deepseek,
    "glm4_moe": _like_deepseek,
    "glm4_moe_lite": _like_deepseek,
    "qwen3_next": _like_qwen,
    "qwen3_5_text": _like_qwen,
    "qwen3_5_moe_text": _like_qwen,
}
"""Model types whose heads are known."""


def family_of(config: Any) -> Family:
    """The family of a text model's config. Raises ConfigError, or UnsupportedError for a head that is not known."""
    count, name = declared_heads(config), config.model_type
    if name in FAMILIES:
        if count is not None and count > 1:
            raise UnsupportedError(f"this {name} has {count} MTP layers, and mtp runs only one: draft without mtp")
        return FAMILIES[name](config.num_hidden_layers)
    if count:
        raise UnsupportedError(
            f"the config of this {name} names MTP layers, and mtp knows those of {', '.join(FAMILIES)}: leave mtp out "
            "of the drafters"
        )
    raise ConfigError(f"{name} has no MTP head: leave mtp out of the drafters, or give a draft model instead")


def declared_heads(config: Any) -> int | None:
    """How many MTP layers a text model's config names; None if it says nothing."""
    named = (getattr(config, name, None) for name in COUNTS)
    return next((count for count in named if isinstance(count, int)), None)
