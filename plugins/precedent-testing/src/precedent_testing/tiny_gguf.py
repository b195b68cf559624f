"""Writes a tiny Llama as a GGUF file in llama.cpp's layout; needs the package gguf."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTROL_TOKEN, NORMAL_TOKEN = 3, 1

SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the blocks of a type have their numbers in float16."""


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator, size: float = 0.01) -> Any:
    """Blocks of a type with random codes and positive scales up to `size`, `[rows, bytes of a row]`."""
    import gguf

    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, width // block, num_bytes), dtype=np.uint8)
    for place in SCALES.get(kind, ()):
        numbers = (rng.random((rows, width // block, 1)) * size).astype("<f2")
        blocks[..., place : place + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(110, 122, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    quantised: bool = False,
    **fields: int,
) -> Path:
    """Write a Llama and its byte-level tokenizer, which must have merges. Returns the file.

    `quantised` stores the matrices in eight bits. Further `fields` set numeric metadata; `__` in a name means a dot.
    """
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    _add_config(writer, model.config)
    _add_tokenizer(writer, tokenizer, pre)
    for name, value in fields.items():
        writer.add_uint16(name.replace("__", "."), value)
    for name, weights in _tensors(model):
        array = weights.float().numpy()
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_config(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, pre: str) -> None:
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    control = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL_TOKEN if token in control else NORMAL_TOKEN for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(str(tokenizer.chat_template))


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, weights in model.state_dict().items():
        kind = name.rpartition("self_attn.")[2]
        stored = _interleaved(weights, heads[kind]) if kind in heads else weights
        yield str(names.get_name(name, try_suffixes=(".weight",))), stored


def _interleaved(weights: Tensor, heads: int) -> Tensor:
    """Reorder rotary pairs from two halves to neighbours, as in llama.cpp."""
    size = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, size, -1).transpose(1, 2).reshape(weights.shape).contiguous()
