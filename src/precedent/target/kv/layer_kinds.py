"""Kinds of layers, by transformers' names, and what a config tells about models that are no targets."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.cache_utils import get_layer_types_and_kwargs

from precedent.errors import UnsupportedError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

INDEXED_ATTENTION = "indexed_attention"
"""Attention to the tokens that an indexer chooses among the visible ones, by keys of its own (DeepSeek V3.2)."""

BLOCK_SPARSE = "minimax_m3_sparse"
"""Attention to blocks of neighbouring keys, which an indexer chooses (MiniMax-M3)."""

REWINDABLE = frozenset({FULL_ATTENTION, SLIDING_ATTENTION, "chunked_attention"})
"""Attention that can be rewound to any earlier token: all keys and values are kept, and masks hide the rest."""

HYBRID = frozenset({"hybrid", "hybrid_sliding"})
"""Layers with a state beside attention."""

RECURRENT = HYBRID | {"linear_attention", "conv"}
"""Layers with a state that follows the tree."""

INDEXED = frozenset({INDEXED_ATTENTION, BLOCK_SPARSE})
"""Layers that choose the keys that they attend to, by keys of their own."""

OF_A_PACKAGE = RECURRENT | INDEXED
"""Layers with a state or an indexer, which precedent-models brings."""

WITH_KEYS = REWINDABLE | HYBRID | INDEXED
"""Layers that keep keys and values."""

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

NO_TARGETS = {
    "blt": "runs several transformers, over bytes and over patches of them, which one KV cache cannot serve",
    "cpmant": "reads the whole text in every forward, whatever its KV cache holds",
    "prophetnet": "predicts several tokens ahead in streams of its own, whose attention candidate trees cannot replace",
} | dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "drafts for a Gemma 4 model, whose keys and values it reads: it cannot be a target by itself",
)
"""Model types that cannot be a target, and why."""

COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Attention to keys of several tokens each (DeepSeek V4)."""

MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, AssertionError)
"""Errors of a forward that does not work with our KV cache or masks."""

LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len", "seq_length")
"""Names that configs give to the longest sequence."""

UNLIMITED = 1 << 30
"""Tokens of a model whose config names no longest sequence: Mamba, for example."""

LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
"""Rotary embeddings that change the frequencies of all tokens once a forward exceeds their training length."""


def check_type(model_type: str) -> None:
    """Raise UnsupportedError for a type of models that cannot be a target whatever its layers are."""
    if model_type in NO_TARGETS:
        raise UnsupportedError(f"{model_type} {NO_TARGETS[model_type]}")


def layers_of(config: Any) -> tuple[Any, set[str]]:
    """The text model's config and its kinds of layers.

    Raises UnsupportedError for a config that does not tell, and for a type of models that cannot be a target.
    """
    check_type(config.model_type)
    try:
        text = config.get_text_config()
        return text, attention_kinds(text)
    except (AttributeError, ValueError) as error:
        reason = f"{error}".splitlines()[0].rstrip(".")
        raise UnsupportedError(
            f"{config.model_type} does not say which layers its text model has ({reason})"
        ) from error


def why_only_chains(config: Any) -> str | None:
    """Why a text model can follow one path of tokens, but no tree, as far as its config tells."""
    return next(
        (why for marker, why in BY_INDEX.items() if marker == config.model_type or getattr(config, marker, None)), None
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
    named = (getattr(config, name, None) for name in LENGTHS)
    longest = next((int(length) for length in named if isinstance(length, int) and length > 0), UNLIMITED)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            longest = min(longest, int(parameters.get("original_max_position_embeddings") or longest))
    return longest


def is_stateful(config: Any) -> bool:
    """Whether the model class declares state that is not in transformers' cache (RWKV, xLSTM).

    A class with several kinds of layers, Qwen3-Next, may have none with a state among those that its config lists.
    """
    if getattr(config, "layer_types", None):
        return False
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model_class, "_is_stateful", False))
