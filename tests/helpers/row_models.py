"""Random models whose layers run in one piece on a CPU, and forwards of them: for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.runtime.team import Team
from precedent.target import Slot, TargetModel
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_cpu.kernel_code import LANES
from precedent_cpu.linear import PackedLinear
from precedent_cpu.row_attention import VECTORS
from precedent_cpu.tile_products import DEPTH
from precedent_testing.tiny_models import tiny_causal_lm

DIM = VECTORS * LANES
"""Numbers of a head that fill whole registers."""

BY_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases, no groups": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral, one kv head": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "hidden_size": 4 * DIM}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "whole tiles": ("llama", {"hidden_size": 3 * DEPTH, "intermediate_size": 5 * DEPTH}),
}
"""Architectures and settings whose layers all run by rows, and in one call."""

_MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

ONE_BY_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 2": ("gemma2", {"query_pre_attn_scalar": 3 * DIM, "attn_logit_softcapping": 3.0, **_MIXED}),
    "gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 3 * DIM, **_MIXED}),
    "gemma 3 with a cap that it ignores": ("gemma3_text", {"attn_logit_softcapping": 1.0, **_MIXED}),
    "vaultgemma": ("vaultgemma", {"attn_logit_softcapping": 3.0, **_MIXED}),
}
"""The same for models with windows, whose layers run by rows one by one."""

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 5
MOST_ROWS = 64


def model_by_rows(architecture: str, dtype: torch.dtype, **settings: Any) -> PreTrainedModel:
    """A random model with heads that fill whole registers."""
    sizes = {"hidden_size": 5 * LANES, "intermediate_size": 7 * LANES, "num_attention_heads": 4, "head_dim": DIM}
    model = tiny_causal_lm(architecture, dtype=dtype, **{**sizes, **settings})
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases are made as ones and zeros, which would hide a mix-up
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype) + name.endswith("bias")
    return model


def wide_tree(num_nodes: int) -> CandidateTree:
    """A tree of points: every third node begins a new branch."""
    builder, last = TreeBuilder(), ROOT
    for token in range(num_nodes):
        last = builder.add_fixed(ROOT if token % 3 == 0 else last, token, "test")
    return builder.build()


def fused_layers(target: TargetModel) -> int:
    """How many of a model's layers were replaced."""
    return sum(hasattr(layer, "fused") for layer in target.model.modules())


def few_rows(target: TargetModel) -> int:
    """Up to how many rows the kernels of few rows do all of a model's products."""
    return min(layer.few_rows for layer in target.model.modules() if isinstance(layer, PackedLinear))


def unfused(target: TargetModel) -> None:
    """Give every layer its own class back, which also keeps them from being run together."""
    for layer in target.model.modules():
        if hasattr(layer, "fused"):
            layer.__class__ = type(layer).__mro__[1]


def scored(target: TargetModel, sizes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of trees of these sizes in one forward, behind prompts of different lengths, and the KV they left."""
    slots = []
    for number in range(len(sizes)):
        slot = target.new_slot()
        target.prefill(slot, PROMPT[: len(PROMPT) - 7 * number])
        slots.append(slot)
    logits = target.score([(slot, wide_tree(size)) for slot, size in zip(slots, sizes, strict=True)])
    for slot, size in zip(slots, sizes, strict=True):
        slot.kv.keep(range(size + 1))
    return [each.clone() for each in logits], [each for slot in slots for each in stored(slot)]


def stored(slot: Slot) -> list[Tensor]:
    """Keys and values of every layer."""
    return [each.clone() for layer in range(3) for each in slot.kv.layer(layer).rows(0, slot.kv.length)]


class GivenTeam(Team):
    """Teams of the given sizes, over and over."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(read=lambda: None, quota=lambda: None)
        self._sizes: Iterator[int] = cycle(sizes)
        self.chosen: list[int] = []

    def size(self, most: int) -> int:
        """The next size, at most `most`."""
        self.chosen.append(min(most, next(self._sizes)))
        return self.chosen[-1]


def equal(some: Iterable, others: Iterable) -> bool:
    """Whether tensors agree to the bit."""
    return all(one.equal(other) for one, other in zip(some, others, strict=True))
