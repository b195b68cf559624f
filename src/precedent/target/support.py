"""Which models can be target or draft models, and a refusal by name for those that cannot."""

from __future__ import annotations

from typing import Any

from precedent.errors import UnsupportedError

FULL_ATTENTION = "full_attention"


def check_supported(config: Any) -> None:
    """Raise UnsupportedError naming the layer kind when a model's layers cannot be rewound to any earlier token."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{config.model_type} is an encoder-decoder model; give a decoder-only causal LM")
    text = config.get_text_config()
    others = sorted({kind for kind in _layer_kinds(text) if kind != FULL_ATTENTION})
    if others:
        raise UnsupportedError(
            f"{text.model_type} has {', '.join(others)} layers; today only models whose every layer is "
            f"{FULL_ATTENTION} can be rewound after a rejected draft"
        )


def _layer_kinds(config: Any) -> list[str]:
    """The kind of each layer, from `layer_types` where the config has it."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return ["sliding_attention"]
    for marker, kind in (("ssm_state_size", "recurrent"), ("state_size", "recurrent"), ("conv_kernel", "recurrent")):
        if getattr(config, marker, None):
            return [kind]
    return [FULL_ATTENTION] * int(config.num_hidden_layers)
