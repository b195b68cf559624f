"""Tiny configs of every causal-LM architecture in transformers, with the kinds of layers that published models have."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

_SIZES = {
    259: "vocab_size text_vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    96: "mamba_d_ssm",
    64: (
        "intermediate_size ffn_dim n_inner d_ff d_inner encoder_ffn_dim decoder_ffn_dim dff intermediate_size_mlp "
        "ffn_hidden_size dense_intermediate_size dim_feedforward feed_forward_size"
    ),
    48: "hidden_size n_embd d_model dim embedding_size emb_dim lru_width embed_dim n_embed block_ff_dim "
    "adapter_in_dim adapter_input_size adapter_out_dim",
    32: "shared_intermediate_size expert_ffn_hidden_size",
    24: "mamba_d_head mamba_headdim mamba_head_dim",
    16: (
        "sliding_window attention_window_size attention_chunk_size chunk_size mamba_chunk_size block_size "
        "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank window_size local_attention "
        "moe_shared_expert_intermediate_size share_expert_dim index_n_heads"
    ),
    258: "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id",
    12: "head_dim global_head_dim d_kv swa_head_dim index_head_dim attention_head_dim dim_head",
    8: (
        "mamba_d_state state_size ssm_state_size linear_key_head_dim linear_value_head_dim linear_head_dim "
        "qk_nope_head_dim v_head_dim hidden_size_per_layer_input swa_v_head_dim"
    ),
    4: (
        "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim mamba_num_heads mamba_n_heads "
        "n_mamba_heads linear_num_value_heads linear_num_heads adapter_rank mamba_dt_rank time_step_rank "
        "index_topk laurel_rank num_routed_experts"
    ),
    2: (
        "num_key_value_heads num_experts_per_tok num_experts_per_token moe_top_k linear_num_key_heads moe_k moe_topk "
        "num_kv_heads num_selected_experts top_k_experts"
    ),
    1: (
        "n_group topk_group n_groups mamba_n_groups mamba_ngroups num_mem_blocks num_expert_group num_limited_groups "
        "first_k_dense_replace num_dense_layers n_shared_experts num_kv_shared_layers"
    ),
}
"""Small values for the names that architectures give to their sizes."""

SMALL = {name: value for value, names in _SIZES.items() for name in names.split()}

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
"""Names for the number of layers."""

LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")
"""Names for lists with an entry for each layer."""

MOST_LAYERS = 4

DERIVED = ("head_dim", "num_key_value_heads")
"""Sizes that some configs leave to be derived, and some models then miss."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_QWEN4_INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 16, "budget": 8, "compress_ratio": 4}

_M3_BLOCKS = {"n_heads": 2, "block_size": 4, "topk_blocks": 3, "local_blocks": 1}

_DOTS3_WINDOWS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 12,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE | {"mrope_section": [2, 2, 2]})
    },
    "dbrx": {"rope_parameters": _ROPE, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots3_note_text": {f"swa_{name}": size for name, size in _DOTS3_WINDOWS.items()}
    | {"shared_experts_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"head_dim": 24},
    "minimax_m3_vl_text": {f"index_{name}": size for name, size in _M3_BLOCKS.items()}
    | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1]},
    "mpt": {"attn_config": {"alibi": True}},
    "qwen4_exp_text": {f"indexer_{name}": size for name, size in _QWEN4_INDEXER.items()},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "stablelm": {"partial_rotary_factor": 0.5},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else an architecture needs."""


def causal_lm_types() -> list[str]:
    """The model type of every config that transformers loads as a causal LM, in alphabetical order."""
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of this class with small sizes. Raises what the class raises for values that it refuses."""
    default = config_class()
    return config_class(**tiny_settings(default))


def tiny_settings(default: PreTrainedConfig) -> dict[str, Any]:
    """Small values for the settings that a config has."""
    known = default.to_dict()
    settings: dict[str, Any] = {name: value for name, value in SMALL.items() if isinstance(known.get(name), int | list)}
    settings |= {name: SMALL[name] for name in DERIVED if name in known}
    if "kv_lora_rank" in known:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # compressed keys serve all heads
        settings["head_dim"] = SMALL["qk_rope_head_dim"]
    settings |= _layers(known)
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            settings[name] = {**tiny_settings(part), "model_type": part.model_type}
    return settings | OWN.get(default.model_type, {})


def _layers(known: dict[str, Any]) -> dict[str, Any]:
    """Each kind of layer that the published model has, twice in turns, or two layers of its only kind."""
    lists = {name: list(known[name]) for name in LISTS if isinstance(known.get(name), list | tuple)}
    count = max((len(set(map(str, kinds))) * 2 for kinds in lists.values()), default=2)
    count = min(max(count, 2), 2 * MOST_LAYERS)
    settings: dict[str, Any] = {name: count for name in LAYERS if isinstance(known.get(name), int)}
    for name, kinds in lists.items():
        different = list(dict.fromkeys(kinds))
        settings[name] = [different[index % len(different)] for index in range(count)]
    return settings
