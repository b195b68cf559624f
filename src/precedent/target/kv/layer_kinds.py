"""Which models can be target or draft models; refuses the others by name."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.cache_utils import get_layer_types_and_kwargs

from precedent.errors import UnsupportedError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

REWINDABLE = frozenset({FULL_ATTENTION, SLIDING_ATTENTION, "chunked_attention"})
"""Attention that can be rewound to any earlier token: all keys and values are kept, and masks hide the rest."""

WITHOUT_ATTENTION = frozenset({"dummy", "moe", "mlp"})
"""Layers that store nothing, or read what another layer stores."""

BY_INDEX = {
    "bloom": "tells positions by a key's place in the KV cache (ALiBi)",
    "mpt": "tells positions by a key's place in the KV cache (ALiBi)",
    "alibi": "tells positions by a key's place in the KV cache (ALiBi)",
    "gpt_neo": "cuts its local windows by a key's place in the KV cache",
    "keep_window_size": "chooses which keys it attends to among all that are in the KV cache (dynamic mask)",
}
"""Model types, or config settings, whose attention uses a key's place in the cache instead of its position id."""

MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, AssertionError)
"""Errors of a forward that does not work with our KV cache or masks."""

LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
"""Rotary embeddings that change the frequencies of all tokens once a forward exceeds their training length."""


def check_supported(config: Any) -> None:
    """Raise UnsupportedError, naming the layer kind, if a model's layers cannot be rewound to any earlier token."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{config.model_type} is an encoder-decoder model, which only Engine and PrecedentLLM take"
        )
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
    """The kinds of attention among a text model's layers, by transformers' names."""
    kinds, _ = get_layer_types_and_kwargs(config)
    return set(kinds) - WITHOUT_ATTENTION


def context_length(config: Any) -> int:
    """Longest sequence that a text model serves, in tokens.

    If rotary frequencies switch at some length, that length is the limit. Beyond it a forward over a tree would differ
    from plain decoding, and keys computed before the switch would differ from those of a fresh prefill.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            longest = min(longest, int(parameters.get("original_max_position_embeddings") or longest))
    return longest


def _is_recurrent(config: Any) -> bool:
    """Whether the model class declares state that is not a KV cache (RWKV, xLSTM)."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model_class, "_is_stateful", False))
