"""Layers over quantised weights in one piece: the same numbers as module by module, and the same bits for every row."""

from __future__ import annotations

from functools import lru_cache
from statistics import median
from typing import Any

import pytest
import torch
from helpers.random_weights import quantise_randomly
from helpers.row_models import DIM, fused_layers, model_by_rows, scored, unfused
from transformers import PreTrainedModel

from precedent.target import TargetModel
from precedent.target.bitwise import decode_plainly
from precedent.tree import ROOT, TreeBuilder
from precedent_cpu.quantised_linear import QuantisedLinear
from precedent_cpu.row_attention import fits

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)

SIZES = ((0,), (5,), (63,), (0, 11, 3))
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}  # k-quants come in blocks of 256
MIXED = ["Q4_K", "Q6_K", "Q5_K"]
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("llama", {}, MIXED),
    "biases": ("qwen2", {"use_sliding_window": False}, ["Q4_0", "Q8_0", "Q5_1"]),
    "norms of heads": ("qwen3", {}, ["Q8_0"]),
    "gemma": ("gemma", {}, ["Q4_1", "IQ4_NL"]),
    "accurate": ("llama", {}, MIXED),
    "accurate, biases": ("qwen2", {"use_sliding_window": False}, ["Q4_0", "Q8_0", "Q5_1"]),
    "accurate gemma": ("gemma", {}, ["Q4_1", "IQ4_NL"]),
    "windows": ("gemma3_text", {"query_pre_attn_scalar": 3 * DIM, **_WINDOWS}, ["Q5_0", "groups of 64, bfloat16"]),
}


def model_of(name: str) -> PreTrainedModel:
    architecture, settings, layouts = MODELS[name]
    model = quantise_randomly(model_by_rows(architecture, torch.float32, **SHAPE, **settings), layouts)
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.accurate = name.startswith("accurate")
    return model


@lru_cache
def target_of(name: str, *, bitwise: bool = False) -> TargetModel:
    return TargetModel(model_of(name), bitwise=bitwise)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_a_row_has_the_same_bits_in_a_tree_in_any_piece_of_a_prompt_and_alone(name: str) -> None:
    """Without `bitwise=True`: quantised layers round alike anyway."""
    target = target_of(name)
    assert fused_layers(target) == 3
    prompt = [(7 * number + number // 5) % target.vocab_size for number in range(150)]
    whole, pieces, decoded = target.new_slot(), target.new_slot(), target.new_slot()
    target.prefill(whole, prompt)
    for end in (1, 9, 40, 111, 150):
        target.prefill(pieces, prompt[:end])
    target.prefill(decoded, prompt[:120])
    decode_plainly(target, decoded, prompt[120:])
    for layer in range(3):
        for kept, *others in zip(
            *(slot.kv.layer(layer).rows(0, 149) for slot in (whole, pieces, decoded)), strict=True
        ):
            assert all(torch.equal(kept, other) for other in others), layer
    builder, node = TreeBuilder(), ROOT
    for token in (3, 1, 4):
        builder.add_fixed(node, token + 1, "test")
        node = builder.add_fixed(node, token, "test")
    trees = target.score([(whole, builder.build()), (pieces, builder.build())])
    plain = decode_plainly(target, decoded, [3, 1, 4])
    assert all(torch.equal(rows[::2], plain) for rows in trees)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_layers_in_one_piece_compute_what_their_modules_do(name: str) -> None:
    """Up to the numbers that lie between two codes of a quantised input, which differences in rounding tip."""
    target = TargetModel(model_of(name))
    every_found = [scored(target, sizes)[0] for sizes in SIZES]
    target.runner.backends.clear()
    one_by_one = [scored(target, sizes)[0] for sizes in SIZES]
    assert all(all(map(torch.equal, *both)) for both in zip(every_found, one_by_one, strict=True))
    unfused(target)
    for sizes, found in zip(SIZES, every_found, strict=True):
        for ours, theirs in zip(found, scored(target, sizes)[0], strict=True):
            assert (ours - theirs).norm() <= 0.03 * theirs.norm()


@pytest.mark.parametrize("name", ["llama", "accurate"])
def test_bitwise_is_proven_at_load(name: str) -> None:
    assert target_of(name, bitwise=True).capabilities.bitwise


@torch.inference_mode()
def test_accurate_layers_are_near_those_without_kernels() -> None:
    """A hundred times nearer than with inputs of eight bits, in the median: a random model magnifies some errors."""
    exact, errors = model_of("llama").double(), dict[str, list[float]]()
    for stride in (7, 5, 11):
        ids = torch.tensor([[(stride * number + number // 5) % 256 for number in range(40)]])
        expected = exact(ids).logits[0, -1]
        for name in ("llama", "accurate"):
            target = target_of(name)
            target.prefill(slot := target.new_slot(), ids[0].tolist())
            error = (target.plain_step(slot)[0] - expected).norm() / expected.norm()
            errors.setdefault(name, []).append(float(error))
    assert median(errors["accurate"]) < median(errors["llama"]) / 100
