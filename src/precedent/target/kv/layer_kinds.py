"""Which models can be target or draft models, and a refusal by name for those that cannot."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.cache_utils import get_layer_types_and_kwargs

from precedent.errors import UnsupportedError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

REWINDABLE = frozenset({FULL_ATTENTION, SLIDING_ATTENTION, "chunked_attention"})
"""Attention that can be taken back to any earlier token: all keys and values are kept, and masks hide the rest."""

WITHOUT_ATTENTION = frozenset({"dummy", "moe", "mlp"})
"""Layers that keep nothing, or read what another layer keeps."""

BY_INDEX = {
    "bloom": "tells positions by a key's place in the KV cache (ALiBi)",
    "mpt": "tells positions by a key's place in the KV cache (ALiBi)",
    "alibi": "tells positions by a key's place in the KV cache (ALiBi)",
    "gpt_neo": "cuts its local windows by a key's place in the KV cache",
    "keep_window_size": "chooses which keys it attends to among all that are in the KV cache (dynamic mask)",
}
"""Model types, or settings of a config, whose attention goes by the place of a key and not by its position id."""

MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, AssertionError)
"""What a forward raises that cannot work with a KV cache or masks of ours."""

LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
"""Rotary embeddings whose frequencies change for all tokens when a forward passes the length they were trained for."""


def check_supported(config: Any) -> None:
    """Raise UnsupportedError naming the layer kind when a model's layers cannot be rewound to any earlier token."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{config.model_type} is an encoder-decoder model; give a decoder-only causal LM")
    text = config.get_text_config()
    others = sorted(attention_kinds(text) - REWINDABLE) or (["recurrent"] if _is_recurrent(text) else [])
    if others:
        raise UnsupportedError(
            f"{text.model_type} has {', '.join(others)} layers, which cannot be rewound after a rejected draft; "
            "give a model with full or sliding-window attention in every layer"
        )
    for marker, reason in BY_INDEX.items():
        if marker == text.model_type or getattr(text, marker, None):
            raise UnsupportedError(
                f"{text.model_type} {reason}, so it cannot score a candidate tree; give a model with position ids"
            )


def attention_kinds(config: Any) -> set[str]:
    """The kinds of attention among a text model's layers, in transformers' words."""
    kinds, _ = get_layer_types_and_kwargs(config)
    return set(kinds) - WITHOUT_ATTENTION


def context_length(config: Any) -> int:
    """Longest sequence that a text model serves, in tokens.

    Where rotary frequencies switch at a length, that length is the limit: beyond it a forward over a tree would not be
    the forward of plain decoding, nor would keys computed before the switch be those of a fresh prefill.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            longest = min(longest, int(parameters.get("original_max_position_embeddings") or longest))
    return longest


def _is_recurrent(config: Any) -> bool:
    """Whether the model class says that it carries state which is no KV cache (RWKV, xLSTM)."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model_class, "_is_stateful", False))
