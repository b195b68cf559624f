"""Codes of every block format of GGUF files, against ggml's own dequantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.errors import ModelLoadError
from precedent_cpu.codes import FORMATS, codes_of
from precedent_testing.tiny_gguf import WIDTH, random_blocks, weight_of

ROWS = 6


def by_ggml(kind: str, blocks: np.ndarray[Any, Any]) -> Any:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_weight_is_what_ggml_reads(
    kind: str, seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the bit, in any band, and with the outputs in another order."""
    rng = np.random.default_rng(seed)
    blocks = random_blocks(kind, ROWS, WIDTH, rng)
    expected, order = by_ggml(kind, blocks), rng.permutation(ROWS)
    first = data.draw(st.integers(0, ROWS - 1))
    last = data.draw(st.integers(first + 1, ROWS))
    weight = weight_of(kind, blocks, tmp_path_factory.mktemp("blocks"))
    layout = FORMATS[kind].layout
    assert np.array_equal(codes_of(weight, slice(first, last)).numbers(layout), expected[first:last])
    weight.release()
    assert np.array_equal(codes_of(weight, order).numbers(layout), expected[order])
    permuted = weight_of(kind, blocks, tmp_path_factory.mktemp("permuted"), order)
    assert np.array_equal(codes_of(permuted, slice(first, last)).numbers(layout), expected[order][first:last])


@pytest.mark.parametrize("kind", FORMATS)
def test_factors_and_levels_are_those_of_the_layout(kind: str, tmp_path: Path) -> None:
    layout = FORMATS[kind].layout
    weight = weight_of(kind, random_blocks(kind, ROWS, WIDTH, np.random.default_rng(0)), tmp_path)
    band = codes_of(weight, slice(None))
    assert band.codes.shape == (ROWS, WIDTH)
    assert band.codes.max() < 1 << layout.bits
    assert band.scales.shape == (ROWS, WIDTH // layout.group)
    assert (band.minima is not None) == layout.minima
    assert (band.factors is not None) == layout.factors
    if layout.scale_dtype == "float16":
        assert np.array_equal(band.scales.astype(np.float16), band.scales)
    if band.factors is not None:
        of_group = np.repeat(band.factors.super_scales.astype(np.float32), 256 // layout.group, axis=1)
        assert np.array_equal(of_group * band.factors.steps, band.scales)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_scale_that_is_no_number_names_the_tensor(kind: str, tmp_path: Path) -> None:
    blocks = random_blocks(kind, ROWS, WIDTH, np.random.default_rng(0))
    blocks[3] = 0xFF  # a NaN in float16, and in the exponents of MXFP4
    weight = weight_of(kind, blocks, tmp_path)
    assert codes_of(weight, slice(0, 3)).codes.any()
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight .* a scale that is not a finite number"):
        codes_of(weight, slice(3, 4))
