"""Products with quantised weights: right, and the same to the last bit whatever is computed beside a row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.random_weights import LAYOUTS, RandomWeight
from torch import Tensor

from precedent.runtime.instructions import KERNELS
from precedent_cpu.quantised_linear import QuantisedEmbedding, QuantisedLinear, pack_quantised
from precedent_cpu.quantised_weights import PackedWeight, packable
from precedent_cpu.row_products import team

pytestmark = pytest.mark.skipif(team() is None, reason="torch runs on other threads here, or lacks fused operations")

OUTS, INPUTS, MOST_ROWS = 75, 512, 110


def linear(layout: str, *, bias: bool = False, seed: int = 0, largest: bool = False) -> QuantisedLinear:
    """A packed layer of random codes, or of the `largest` ones."""
    added = torch.randn(OUTS, generator=torch.Generator().manual_seed(seed)) if bias else None
    weight = RandomWeight(LAYOUTS[layout], OUTS, INPUTS, seed)
    if largest:
        weight.codes[:] = (1 << weight.layout.bits) - 1
    layer = QuantisedLinear(weight, added)
    pack_quantised(layer)
    assert layer.packed is not None
    return layer


def rows_of(count: int, seed: int = 1) -> Tensor:
    """Normal numbers with a few large ones, as hidden states have."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, INPUTS, generator=generator)
    return rows * torch.where(torch.rand(INPUTS, generator=generator) < 0.02, 30.0, 1.0)


def quantised(rows: Tensor) -> Tensor:
    """Rows as the kernels see them: int8 with one float32 scale for 32 inputs, as float64."""
    blocks = rows.numpy().reshape(len(rows), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / largest))
    return torch.from_numpy((codes.astype(np.float64) * (largest / np.float32(127))).reshape(len(rows), -1))


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(3)
def test_the_product_is_that_of_the_quantised_rows(layout: str) -> None:
    """Against float64: only float32 sums over the blocks are rounded."""
    layer, rows = linear(layout, bias=True), rows_of(21)
    weight = torch.from_numpy(layer.quantised.dequantised(slice(OUTS))).double()
    assert layer.bias is not None
    exact, sizes = quantised(rows) @ weight.T + layer.bias.double(), quantised(rows).abs() @ weight.abs().T
    assert ((layer(rows).double() - exact).abs() <= 2**-20 * (sizes + 1)).all()


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(4)
def test_accurate_inputs_have_sixteen_bits(layout: str) -> None:
    """Against float64 without quantised inputs; a row has the same bits alone."""
    layer, rows = linear(layout, bias=True), rows_of(21)
    layer.prepare(PackedWeight(layer.quantised), accurate=True)
    weight = torch.from_numpy(layer.quantised.dequantised(slice(OUTS))).double()
    assert layer.bias is not None
    exact, sizes = rows.double() @ weight.T + layer.bias.double(), rows.double().abs() @ weight.abs().T
    largest = rows.reshape(21, -1, 32).abs().amax(-1).repeat_interleave(32, 1).double() @ weight.abs().T
    found = layer(rows)
    assert ((found.double() - exact).abs() <= largest / (2 * 127 * 254) + 2**-19 * (sizes + 1)).all()
    assert torch.equal(torch.cat([layer(row[None]) for row in rows]), found)


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.sampled(5)
def test_a_row_has_the_same_bits_beside_any_other_rows(layout: str, threads: int) -> None:
    layer, rows, before = linear(layout), rows_of(MOST_ROWS), torch.get_num_threads()
    alone = torch.cat([layer(row[None]) for row in rows])
    try:
        torch.set_num_threads(threads)
        for count in (*range(1, 20), 31, 32, 33, 47, 64, 65, 100, MOST_ROWS):
            assert torch.equal(layer(rows[-count:]), alone[-count:]), count
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_embedding_looks_up_the_numbers_of_the_file(layout: str) -> None:
    """To the last bit, from the tensor that a head may share."""
    weight, ids = RandomWeight(LAYOUTS[layout], OUTS, INPUTS), torch.tensor([[0, 74, 31], [32, 64, 31]])
    embedding, head = QuantisedEmbedding(weight, 3.0), QuantisedLinear(weight)
    pack_quantised(torch.nn.ModuleList([embedding, head]))
    assert embedding.packed is not None
    assert torch.equal(embedding(ids), 3.0 * torch.from_numpy(weight.dequantised(slice(OUTS)))[ids])
    with pytest.raises(IndexError, match="below 75"):
        embedding(torch.tensor([75]))


@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_row() -> None:
    layer, rows = linear("Q4_K"), rows_of(12)
    expected = layer(rows)
    rows[1, 3], rows[7, 0], rows[9] = float("nan"), float("-inf"), 0.0
    found, others = layer(rows), [row for row in range(12) if row not in (1, 7, 9)]
    assert found[1].isnan().all()
    assert not found[7].isfinite().any()
    assert (found[9] == 0).all()
    assert torch.equal(found[others], expected[others])


@torch.inference_mode()
@pytest.mark.parametrize("size", [1e-38, 1e-29, 1e30])
def test_very_small_and_large_numbers_are_quantised_too(size: float) -> None:
    layer, rows = linear("Q8_0"), rows_of(2)
    found, expected = layer(rows * size), layer(rows) * size
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-27)


def test_weights_that_do_not_fit_keep_their_own_forward() -> None:
    """Inputs that are not whole blocks."""
    layer = QuantisedLinear(RandomWeight(LAYOUTS["groups of 16 with minima"], 8, 48))
    pack_quantised(layer)
    assert not packable(layer.quantised)
    assert layer.packed is None
    assert layer(torch.randn(2, 48)).shape == (2, 8)


@torch.inference_mode()
@pytest.mark.parametrize("accurate", [False, True])
def test_permuted_inputs_are_sorted_before_they_are_quantised(accurate: bool) -> None:
    """As codes are stored sorted by group: a group's inputs share a scale."""
    weight, rows = RandomWeight(LAYOUTS["Q4_0"], OUTS, INPUTS), rows_of(5)
    weight.order = np.random.default_rng(0).permutation(INPUTS)
    permuted, plain = QuantisedLinear(weight), QuantisedLinear(RandomWeight(LAYOUTS["Q4_0"], OUTS, INPUTS))
    permuted.accurate = plain.accurate = accurate
    for layer in (permuted, plain):
        pack_quantised(layer)
    assert permuted.packed is not None
    assert torch.equal(permuted(rows), plain(rows[:, weight.order]))
    exact = rows.double() @ torch.from_numpy(weight.dequantised(slice(OUTS))).double().T
    assert (permuted(rows) - exact).norm() < (1e-4 if accurate else 0.02) * exact.norm()


DIGEST = """
import hashlib, sys, torch
from helpers.random_weights import LAYOUTS
from test_quantised_products import linear, rows_of
digest = hashlib.sha256()
with torch.inference_mode():
    for layout in LAYOUTS:
        for count in (1, 3, 7, 12, 70, 100):
            digest.update(linear(layout)(rows_of(count)).numpy().tobytes())
        digest.update(linear(layout, largest=True)(torch.ones(5, 512)).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_all_instructions_give_the_same_bits() -> None:
    """Whatever this processor has and can leave out."""
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parents[2] / "tests")])
    found = {}
    for kernels in ("native", "avx512", "avxvnni", "avx2"):
        environment = os.environ | {KERNELS: kernels, "PYTHONPATH": paths}
        ran = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=False
        )
        if ran.returncode == 0:
            found[kernels] = ran.stdout
        else:
            assert "does not have" in ran.stderr, ran.stderr
    assert len(set(found.values())) == 1
