"""Writes a tiny Llama, or random weights of any shape, as a GGUF file in llama.cpp's layout; needs the package gguf."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

CONTROL_TOKEN, NORMAL_TOKEN, UNUSED_TOKEN = 3, 1, 5
SPREAD = 0.04
"""Standard deviation of random weights."""

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


def write_random_gguf(
    file: Path, config: LlamaConfig, tokenizer: PreTrainedTokenizerBase, kind: Callable[[str], str]
) -> Path:
    """Write a Llama whose matrices are random blocks of the type that `kind` gives for each name. Returns the file.

    Nothing is quantised, so that a file of a gigabyte takes seconds. The vocabulary is padded with unused tokens.
    """
    import gguf

    writer, rng = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    _add_config(writer, config)
    _add_tokenizer(writer, tokenizer, "smollm", config.vocab_size)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name, weights in _tensors(model):
        if weights.ndim == 1:
            writer.add_tensor(name, np.ones(weights.shape, np.float32))
        elif name != "output.weight" or not config.tie_word_embeddings:
            rows, width = weights.shape
            stored = gguf.GGMLQuantizationType[kind(name)]
            spread = gguf.quants.dequantize(random_blocks(stored.name, 16, width, rng, 1.0), stored).std()
            writer.add_tensor(name, random_blocks(stored.name, rows, width, rng, SPREAD / spread), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def q4_k_m(layers: int) -> Callable[[str], str]:
    """The types of a Q4_K_M file of so many layers: llama.cpp stores half of two matrices, and the head, in Q6_K."""

    def kind(name: str) -> str:
        if name in ("token_embd.weight", "output.weight"):
            return "Q6_K"
        layer, eighth = int(name.split(".")[1]), layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return "Q6_K" if more and ("attn_v" in name or "ffn_down" in name) else "Q4_K"

    return kind


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


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, pre: str, size: int = 0) -> None:
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    unused = [f"<unused {number}>" for number in range(len(tokens), size)]
    control = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *unused])
    types = [CONTROL_TOKEN if token in control else NORMAL_TOKEN for token in tokens]
    writer.add_token_types([*types, *[UNUSED_TOKEN] * len(unused)])
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
