"""Checkpoints in the layouts of quantisers, written from the definitions of their formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

GROUP = 32
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each four bits of a word, by AWQ."""


class Packed(NamedTuple):
    """Tensors of one linear layer by the end of their names, its weight, and what torchao says of it in the file."""

    tensors: dict[str, Tensor]
    weight: Tensor
    described: str = ""


def words(codes: np.ndarray, bits: int, axis: int) -> Tensor:
    """Codes in words of 32 bits along an axis, the lowest first."""
    moved = np.moveaxis(codes.astype(np.uint32), axis, -1)
    per_word = 32 // bits
    shaped = moved.reshape(*moved.shape[:-1], -1, per_word) << np.arange(0, 32, bits, dtype=np.uint32)
    packed = np.moveaxis(np.bitwise_or.reduce(shaped, -1), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def random_parts(shape: torch.Size, bits: int, seed: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes `[outputs, inputs]`, scales in float16 and zero points `[outputs, groups]`."""
    rng, (outputs, inputs) = np.random.default_rng(seed), shape
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    scales = (rng.random((outputs, groups)) * 0.5 / (1 << bits) + 1e-3).astype(np.float16)
    return codes, scales, rng.integers(0, 1 << bits, (outputs, groups))


def numbers(codes: np.ndarray, scales: np.ndarray, zeros: Any, groups_of: np.ndarray) -> Tensor:
    """`(code - zero) * scale`, with the group of each input."""
    zeros = np.broadcast_to(zeros, scales.shape)[:, groups_of]
    return torch.from_numpy(((codes - zeros) * scales.astype(np.float32)[:, groups_of]).astype(np.float32))


def gptq(shape: torch.Size, seed: int, *, bits: int = 4, version: int = 1, act_order: bool = False) -> Packed:
    inputs = shape[1]
    groups = inputs // GROUP
    codes, scales, zeros = random_parts(shape, bits, seed, groups)
    groups_of = np.arange(inputs) // GROUP
    if act_order:
        groups_of = np.random.default_rng(seed).permutation(groups_of)
    stored = (zeros - (1 if version == 1 else 0)) & ((1 << bits) - 1)
    tensors = {
        "qweight": words(codes.T, bits, 0),
        "qzeros": words(stored.T, bits, 1),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups_of.astype(np.int32)),
    }
    return Packed(tensors, numbers(codes, scales, zeros, groups_of))


def awq(shape: torch.Size, seed: int) -> Packed:
    inputs = shape[1]
    codes, scales, zeros = random_parts(shape, 4, seed, inputs // GROUP)

    def interleaved(values: np.ndarray) -> Tensor:
        return words(values.T.reshape(values.shape[1], -1, 8)[:, :, AWQ_PLACES].reshape(values.shape[1], -1), 4, 1)

    tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": torch.from_numpy(scales.T.copy())}
    return Packed(tensors, numbers(codes, scales, zeros, np.arange(inputs) // GROUP))


def compressed(
    shape: torch.Size, seed: int, *, bits: int = 4, symmetric: bool = True, whole_rows: bool = False
) -> Packed:
    outputs, inputs = shape
    groups = 1 if whole_rows else inputs // GROUP
    codes, scales, zeros = random_parts(shape, bits, seed, groups)
    half = 1 << (bits - 1)
    zeros = np.full_like(zeros, half) if symmetric else zeros
    wide = torch.from_numpy(scales).to(torch.bfloat16)
    tensors = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": wide,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, bits, 0)
    groups_of = np.arange(inputs) // (inputs // groups)
    return Packed(tensors, numbers(codes, wide.float().numpy(), zeros, groups_of))


def compressed_bytes(shape: torch.Size, seed: int) -> Packed:
    """Signed bytes with a scale for each output."""
    codes, scales, _ = random_parts(shape, 8, seed, 1)
    tensors = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
    return Packed(tensors, numbers(codes, scales, 128, np.zeros(shape[1], np.int64)))


def torchao_int4(shape: torch.Size, seed: int) -> Packed:
    """Signed codes, two in a byte; the zero point is a number that is added."""
    codes, scales, zeros = random_parts(shape, 4, seed, shape[1] // GROUP)
    low = (zeros * 0.01).astype(np.float16)
    signed = (codes ^ 8).astype(np.uint8)
    groups_of = np.arange(shape[1]) // GROUP
    tensors = {
        "_weight_qdata": torch.from_numpy(signed[:, ::2] | signed[:, 1::2] << 4).view(torch.int8),
        "_weight_scale": torch.from_numpy(scales.T.copy()),
        "_weight_zero_point": torch.from_numpy(low.T.copy()),
    }
    weight = numbers(codes, scales, 8, groups_of) + torch.from_numpy(low.astype(np.float32)[:, groups_of])
    return Packed(tensors, weight, '{"_type": "Int4Tensor", "_data": {}}')


def torchao_int8(shape: torch.Size, seed: int) -> Packed:
    codes, scales, _ = random_parts(shape, 8, seed, 1)
    wide = torch.from_numpy(scales.astype(np.float32))
    zeros = torch.zeros(shape[0], 1, dtype=torch.int8)
    tensors = {
        "_weight_qdata": torch.from_numpy((codes - 128).astype(np.int8)),
        "_weight_scale": wide,
        "_weight_zero_point": zeros,
    }
    weight = numbers(codes, scales, 128, np.zeros(shape[1], np.int64))
    return Packed(tensors, weight, '{"_type": "Int8Tensor", "_data": {}}')


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}

Formats = dict[str, tuple[dict[str, Any], Callable[..., Packed]]]

FORMATS: Formats = {
    "gptq": (GPTQ, gptq),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda shape, seed: gptq(shape, seed, version=2)),
    "gptq act-order": ({**GPTQ, "desc_act": True}, lambda shape, seed: gptq(shape, seed, act_order=True)),
    "gptq 8": ({**GPTQ, "bits": 8}, lambda shape, seed: gptq(shape, seed, bits=8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "compressed": (COMPRESSED, compressed),
    "compressed 8": (COMPRESSED, lambda shape, seed: compressed(shape, seed, bits=8)),
    "compressed rows": (COMPRESSED, lambda shape, seed: compressed(shape, seed, whole_rows=True)),
    "compressed zeros": (COMPRESSED, lambda shape, seed: compressed(shape, seed, symmetric=False)),
    "compressed bytes": ({**COMPRESSED, "format": "int-quantized"}, compressed_bytes),
    "torchao int4": ({"quant_method": "torchao", "quant_type": "int4"}, torchao_int4),
    "torchao int8": ({"quant_method": "torchao", "quant_type": "int8"}, torchao_int8),
}
"""What the config of each format says, and what writes a layer."""


def write_packed(folder: Path, name: str, formats: Formats = FORMATS) -> PreTrainedModel:
    """Write a tiny checkpoint of a format whose head and embeddings are plain; returns the model that it means."""
    settings, pack = formats[name]
    model = tiny_causal_lm(dtype=torch.float32, hidden_size=64, intermediate_size=96)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    metadata = {"format": "pt"}
    described = []
    for seed, key in enumerate([key for key in tensors if key.endswith("_proj.weight")]):
        packed = pack(model.get_parameter(key).shape, seed)
        model.get_parameter(key).data.copy_(packed.weight)
        del tensors[key]
        tensors |= {f"{key.removesuffix('weight')}{part}": value.contiguous() for part, value in packed.tensors.items()}
        if packed.described:
            metadata[key] = packed.described
            described.append(key)
    if described:
        metadata["tensor_names"] = json.dumps(described)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    return model
