"""Tiny hybrids: a model of each family of recurrences, with each kind of its layers."""

from __future__ import annotations

import random
from functools import cache

from precedent.target import Slot, TargetModel
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_testing.sweep import tiny_model

FAMILIES = {
    "qwen3_next": "gated delta rule",
    "kimi_linear": "gated delta rule with a decay for each channel",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2 beside attention in one layer",
    "jamba": "Mamba-1",
    "zamba": "Mamba-1 in several heads, and layers with both",
    "mamba2": "Mamba-2 alone",
    "mamba": "Mamba-1 alone",
    "lfm2": "short convolution",
    "minimax": "lightning attention",
    "recurrent_gemma": "RG-LRU",
}
"""Model types, and what is special about them."""

ONE_PATH = ("zaya", "bloom", "trocr")
"""Models that follow a single path: a state of an unknown family, positions by places in the cache, or by length."""


@cache
def hybrid(model_type: str) -> TargetModel:
    """A tiny random target in float64; shared by all tests of a file."""
    return TargetModel(tiny_model(model_type))


def random_tree(seed: int, num_nodes: int, *, one_path: bool = False) -> CandidateTree:
    """A tree of random tokens and shape, or one path."""
    choose, builder, nodes = random.Random(seed), TreeBuilder(), [ROOT]
    for _ in range(num_nodes):
        nodes.append(builder.add_fixed(nodes[-1] if one_path else choose.choice(nodes), choose.randrange(250), "test"))
    return builder.build()


def random_ids(seed: int, count: int) -> list[int]:
    """Tokens of a text."""
    choose = random.Random(seed)
    return [choose.randrange(250) for _ in range(count)]


def prefilled(target: TargetModel, prompt: list[int], chunk: int = 512) -> Slot:
    """A slot that holds the prompt."""
    slot = target.new_slot()
    target.prefill(slot, prompt, chunk=chunk)
    return slot
