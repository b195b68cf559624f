"""Writes models as GGUF files in llama.cpp's layout, tiny ones or large random ones; needs the package gguf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.target.load.gguf_header import TensorEntry
from precedent.target.load.gguf_weights import GgufWeight, MappedFile

CONTROL_TOKEN, NORMAL_TOKEN, UNUSED_TOKEN = 3, 1, 5

WIDTH = 512
"""Columns of the matrices of `weight_of`."""

SPREAD = 0.04
"""Standard deviation of random weights."""

SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XS": (0,), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the blocks of a type have their numbers in float16."""


def weight_of(kind: str, blocks: np.ndarray[Any, Any], folder: Path, row_order: Any = None) -> GgufWeight:
    """A matrix of these blocks in rows of `WIDTH`, somewhere in a file."""
    file = folder / "blocks.bin"
    file.write_bytes(bytes(100) + blocks.tobytes() + bytes(100))
    entry = TensorEntry("blk.0.attn_q.weight", kind, (len(blocks), WIDTH), 100, blocks.nbytes)
    return GgufWeight(MappedFile(file), entry, row_order)


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
    kind: str | Mapping[str, str] = "F32",
    parts: int = 1,
    more: Mapping[str, Tensor] | None = None,
    **fields: int | float | str,
) -> Path:
    """Write a model of Llama's, Gemma's or Qwen's family and its byte-level tokenizer, which must have merges.

    Matrices are stored in blocks of type `kind`, or of that of the first of its keys which their name contains; types
    that the package gguf cannot write, and models on the device `meta`, get random codes. `more` are tensors beside the
    model's. Further `fields` set metadata; `__` in a name means a dot. In several `parts`, the file is the
    first. Unused tokens fill the vocabulary. Returns the file.
    """
    import gguf

    kinds = {"": kind} if isinstance(kind, str) else kind
    found = [gguf.GGUFWriter(file, architecture)]
    _add_config(found[0], model.config)
    _add_tokenizer(found[0], tokenizer, pre, model.config.vocab_size)
    for name, value in fields.items():
        found[0].kv_data[0].pop(name.replace("__", "."), None)
        adders: dict[type, Any] = {str: found[0].add_string, float: found[0].add_float32}
        add = adders.get(type(value), found[0].add_uint32)
        add(name.replace("__", "."), value)
    places = [file]
    if parts > 1:
        places = [file.with_name(f"{file.stem}-{number:05}-of-{parts:05}.gguf") for number in range(1, parts + 1)]
        found = [found[0], *(gguf.GGUFWriter(file, architecture) for _ in places[1:])]
        for number, writer in enumerate(found):
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
    rng = np.random.default_rng(0)
    for number, (name, weights) in enumerate([*_tensors(model, architecture), *(more or {}).items()]):
        matrices = weights.dim() == 2 or name.endswith("_exps.weight")
        chosen = next((kinds[part] for part in kinds if part in name), "F32") if matrices else "F32"
        type_ = gguf.GGMLQuantizationType[chosen]
        array = (torch.ones(weights.shape) if weights.is_meta and weights.dim() == 1 else weights).float()
        try:
            blocks = _random(type_, array.shape, rng) if array.is_meta else gguf.quants.quantize(array.numpy(), type_)
        except NotImplementedError:
            blocks = _random(type_, array.shape, rng)
        found[number % parts].add_tensor(name, blocks, raw_dtype=type_)
    for place, writer in zip(places, found, strict=True):
        writer.write_header_to_file(place)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return places[0]


def _random(kind: Any, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Random blocks whose numbers spread as weights do."""
    import gguf

    sample = gguf.quants.dequantize(random_blocks(kind.name, 16, shape[-1], rng, 1.0), kind)
    return random_blocks(kind.name, prod(shape[:-1]), shape[-1], rng, SPREAD / sample.std()).reshape(*shape[:-1], -1)


def _add_config(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rotary = config.rope_parameters
    writer.add_rope_freq_base(rotary.get("full_attention", rotary)["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if experts := getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, pre: str, size: int) -> None:
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


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names and in the form that llama.cpp gives them."""
    import gguf

    config = model.config
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    arch = known[architecture] if model.config.model_type != "llama" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, weights in model.state_dict().items():
        kind = name.rpartition("self_attn.")[2]
        stored = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        place = name.replace("model.layers", "blk").replace("mlp.experts.", "ffn_")
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weights.chunk(2, 1), strict=True):
                yield place.replace("gate_up_proj", f"{part}_exps.weight"), half
        elif name.endswith("experts.down_proj"):
            yield place.replace("down_proj", "down_exps.weight"), weights
        elif architecture == "llama" and kind in heads:
            yield stored, _interleaved(weights, heads[kind])
        elif architecture.startswith("gemma") and stored.endswith("norm.weight"):
            yield stored, weights + 1
        else:
            yield stored, weights


def _interleaved(weights: Tensor, heads: int) -> Tensor:
    """Reorder rotary pairs from two halves to neighbours, as in llama.cpp."""
    size = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, size, -1).transpose(1, 2).reshape(weights.shape).contiguous()
