"""Tensors of GGUF files: every block format against ggml's own dequantisation, and every way a directory can be bad."""

from __future__ import annotations

import copy
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gguf")

import gguf

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.load.gguf_header import KINDS, TensorEntry, read_directory, read_header
from precedent.target.load.gguf_weights import FORMATS, GgufWeight, MappedFile
from precedent.target.quantised import dequantised, dequantised_rows
from precedent_testing.tiny_gguf import random_blocks

ROWS, WIDTH = 6, 512


def weight_of(kind: str, blocks: np.ndarray[Any, Any], folder: Path, row_order: Any = None) -> GgufWeight:
    """A matrix of these blocks, somewhere in a file."""
    file = folder / "blocks.bin"
    file.write_bytes(bytes(100) + blocks.tobytes() + bytes(100))
    entry = TensorEntry("blk.0.attn_q.weight", kind, (len(blocks), WIDTH), 100, blocks.nbytes)
    return GgufWeight(MappedFile(file), entry, row_order)


def by_ggml(kind: str, blocks: np.ndarray[Any, Any]) -> Any:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def test_sizes_of_blocks_are_those_of_ggml() -> None:
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: sizes[name] for name, *_ in KINDS.values()} == {name: tuple(size) for name, *size in KINDS.values()}
    assert all(gguf.GGMLQuantizationType(number).name == name for number, (name, *_) in KINDS.items())


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
    assert np.array_equal(dequantised(weight, first, last), expected[first:last])
    weight.release()
    assert np.array_equal(dequantised_rows(weight, order), expected[order])
    permuted = weight_of(kind, blocks, tmp_path_factory.mktemp("permuted"), order)
    assert np.array_equal(dequantised(permuted, first, last), expected[order][first:last])


@pytest.mark.parametrize("kind", FORMATS)
def test_factors_and_levels_are_those_of_the_layout(kind: str, tmp_path: Path) -> None:
    layout = FORMATS[kind][0]
    band = weight_of(kind, random_blocks(kind, ROWS, WIDTH, np.random.default_rng(0)), tmp_path).band(0, ROWS)
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
    assert weight.band(0, 3).codes.any()
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight .* a scale that is not a finite number"):
        weight.band(3, 4)


def test_a_weight_is_its_own_copy_and_cannot_be_pickled(tmp_path: Path) -> None:
    weight = weight_of("Q8_0", random_blocks("Q8_0", ROWS, WIDTH, np.random.default_rng(0)), tmp_path)
    assert copy.deepcopy(weight) is weight
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        pickle.dumps(weight)


def a_file(
    folder: Path, *, shape: tuple[int, ...] = (2, 64), number: int = 8, offset: int = 0, data: int = 256, **header: Any
) -> Path:
    """A GGUF file with a tensor of 136 bytes between two others."""
    version, order = header.get("version", 3), header.get("order", "<")
    alignment = header.get("alignment", 32)
    pair = struct.pack("<Q17sII", 17, b"general.alignment", 4, alignment)
    entries = [("first", (8,), 0, 0), ("blk.0.ffn_up.weight", shape, number, 32 + offset), ("last", (8,), 0, 192)]
    table = b"".join(
        struct.pack(f"<Q{len(name)}sI{len(sizes)}QIQ", len(name), name.encode(), len(sizes), *sizes[::-1], kind, place)
        for name, sizes, kind, place in entries
    )
    content = b"GGUF" + struct.pack(f"{order}I", version) + struct.pack("<QQ", len(entries), 1) + pair + table
    file = folder / "model.gguf"
    file.write_bytes(content + bytes(-len(content) % 32) + bytes(data))
    return file


def test_a_directory_has_the_place_of_every_tensor(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    metadata, entries = read_directory(file)
    assert metadata == read_header(file) == {"general.alignment": 32}
    assert [(entry.name, entry.kind, entry.shape, entry.nbytes) for entry in entries] == [
        ("first", "F32", (8,), 32),
        ("blk.0.ffn_up.weight", "Q8_0", (2, 64), 136),
        ("last", "F32", (8,), 32),
    ]
    assert [entry.start % 32 for entry in entries] == [0, 0, 0]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"data": 100}, r"blk\.0\.ffn_up\.weight of shape \(2, 64\) would end at byte .* cut short"),
        ({"shape": (3, 64)}, r"blk\.0\.ffn_up\.weight of 204 bytes reaches into last"),
        ({"shape": (2, 63)}, r"blk\.0\.ffn_up\.weight of type Q8_0 has the shape \(2, 63\)"),
        ({"shape": (0, 64)}, r"blk\.0\.ffn_up\.weight of type Q8_0 has the shape \(0, 64\)"),
        ({"shape": (2**62, 2**40)}, r"blk\.0\.ffn_up\.weight of shape .* would end at byte"),
        ({"shape": (1, 1, 1, 2, 64)}, r"blk\.0\.ffn_up\.weight has 5 dimensions"),
        ({"number": 99}, r"blk\.0\.ffn_up\.weight has the unknown type 99"),
        ({"offset": 1}, r"blk\.0\.ffn_up\.weight begins at 33, which is no multiple of 32"),
        ({"alignment": 24}, "its alignment is 24"),
        ({"order": ">"}, "it is big-endian"),
        ({"version": 1}, "its version is 1"),
    ],
)
def test_a_bad_directory_is_one_line_that_names_the_tensor(fault: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        read_directory(a_file(tmp_path, **fault))
    assert "\n" not in str(caught.value)
