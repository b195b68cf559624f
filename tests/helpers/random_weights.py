"""Quantised weights of random codes and scales, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from precedent.target.quantised import Rows
from precedent_cpu.codes import Band, CodedWeight, Factors, Layout
from precedent_cpu.quantised_linear import QuantisedEmbedding, QuantisedLinear

LAYOUTS = {
    "Q4_0": Layout(4, 32, 8),
    "Q4_1": Layout(4, 32, minima=True),
    "Q5_0": Layout(5, 32, 16),
    "Q5_1": Layout(5, 32, minima=True),
    "Q8_0": Layout(8, 32, 128),
    "Q4_K": Layout(4, 32, minima=True, scale_dtype="float32", factors=True),
    "Q5_K": Layout(5, 32, minima=True, scale_dtype="float32", factors=True),
    "Q6_K": Layout(6, 16, 32, scale_dtype="float32", factors=True),
    "IQ4_NL": Layout(4, 32, table=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
    "MXFP4": Layout(4, 32, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), scale_dtype="bfloat16"),
    "groups of 64, bfloat16": Layout(4, 64, 8, scale_dtype="bfloat16"),
    "groups of 128, float32 and minima": Layout(4, 128, minima=True, scale_dtype="float32"),
    "groups of 16 with minima": Layout(8, 16, 128, minima=True),
}
"""Layouts by the names of formats that have them."""


class RandomWeight(CodedWeight):
    """A weight of random codes and scales."""

    def __init__(self, layout: Layout, outs: int, inputs: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.name, self.kind, self.layout = "random.weight", "random", layout
        self.out_features, self.in_features = outs, inputs
        self.codes = rng.integers(0, 1 << layout.bits, (outs, inputs)).astype(np.uint8)
        groups, self.factors = inputs // layout.group, None
        self.minima: NDArray[np.float32] | None = None
        if layout.factors:
            self._make_factors(rng, groups)
            return
        self.scales = _exactly(rng.random((outs, groups)) * 0.01, layout.scale_dtype)
        if layout.minima:
            self.minima = _exactly(rng.random((outs, groups)) * -0.05, layout.scale_dtype)

    def _make_factors(self, rng: np.random.Generator, groups: int) -> None:
        outs, supers = self.out_features, self.in_features // 256
        shape, share = (outs, groups), 256 // self.layout.group
        super_scales = (rng.random((outs, supers)) * 0.001).astype(np.float16)
        if not self.layout.minima:
            steps = rng.integers(-60, 60, shape).astype(np.int8)
            self.factors = Factors(super_scales, steps)
        else:
            steps = rng.integers(0, 64, shape).astype(np.uint8)
            super_minima = (rng.random((outs, supers)) * 0.002).astype(np.float16)
            minimum_steps = rng.integers(0, 64, shape).astype(np.uint8)
            self.factors = Factors(super_scales, steps, super_minima, minimum_steps)
            self.minima = -np.repeat(super_minima.astype(np.float32), share, 1) * minimum_steps.astype(np.float32)
        self.scales = np.repeat(super_scales.astype(np.float32), share, 1) * steps.astype(np.float32)

    def rows(self, which: Rows) -> Band:
        factors = self.factors
        if factors is not None:
            parts = (factors.super_scales, factors.steps, factors.super_minima, factors.minimum_steps)
            factors = Factors(*(None if part is None else part[which] for part in parts))  # type: ignore[arg-type]
        minima = None if self.minima is None else self.minima[which]
        return Band(self.codes[which], self.scales[which], minima, factors)

    @property
    def stored(self) -> NDArray[Any]:
        return self.codes


def _exactly(numbers: NDArray[np.float64], dtype: str) -> NDArray[np.float32]:
    """Numbers that the dtype holds exactly, as float32."""
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return numbers.astype(dtype).astype(np.float32)


def quantise_randomly(model: PreTrainedModel, layouts: Sequence[str]) -> PreTrainedModel:
    """Replace the linear layers of a model by random quantised ones, in turn of these layouts, in place.

    Embedding and head share a weight of the first layout.
    """
    number = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child is not model.get_output_embeddings():
                layout = LAYOUTS[layouts[number % len(layouts)]]
                weight = RandomWeight(layout, child.out_features, child.in_features, number)
                parent.register_module(name, QuantisedLinear(weight, child.bias))
                number += 1
    embedding: Any = model.get_input_embeddings()
    shared = RandomWeight(LAYOUTS[layouts[0]], embedding.num_embeddings, embedding.embedding_dim, number)
    model.set_input_embeddings(QuantisedEmbedding(shared, float(getattr(embedding, "scalar_embed_scale", 1.0))))
    model.set_output_embeddings(QuantisedLinear(shared))
    return model
