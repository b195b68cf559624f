"""Tiny settings for the architectures that the target model is tested on: two layers, windows shorter than a prompt.

`tiny_causal_lm(name, **settings_of(name))` builds one, with grouped key/value heads where the architecture has them.
"""

from __future__ import annotations

from typing import Any

WINDOW = 16
"""Tokens that a sliding window spans in these models."""

_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **_MIXED},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "gemma4_text": {
        **_MIXED,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 259,
    },
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "gpt_neox": {},
    "gpt_oss": {**_EXPERTS, **_MIXED},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "cohere2": _MIXED,
    "starcoder2": {"sliding_window": WINDOW},
    "mixtral": _EXPERTS,
    "llama4_text": {
        **_EXPERTS,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 32,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "stablelm": {"partial_rotary_factor": 0.5},
    "falcon": {"head_dim": None, "multi_query": True},
}

ARCHITECTURES = tuple(_OWN)
"""Model types of transformers, as tests/target/test_target_architectures.py runs them."""

ONE_BY_ONE = frozenset({"stablelm", "falcon"})
"""Those that do not go through transformers' attention interface: scored one sequence after the other."""


def settings_of(architecture: str) -> dict[str, Any]:
    """Settings for `tiny_causal_lm`."""
    settings = {**_SMALL, **_OWN[architecture]}
    return {name: value for name, value in settings.items() if value is not None}
