"""Tensors of GGUF files: rows as a model has them, and every way a directory can be bad."""

from __future__ import annotations

import copy
import pickle
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.load.gguf_header import KINDS, read_directory, read_header
from precedent_testing.tiny_gguf import WIDTH, random_blocks, weight_of

ROWS = 6


def by_ggml(kind: str, blocks: np.ndarray[Any, Any]) -> Any:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def test_sizes_of_blocks_are_those_of_ggml() -> None:
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: sizes[name] for name, *_ in KINDS.values()} == {name: tuple(size) for name, *size in KINDS.values()}
    assert all(gguf.GGMLQuantizationType(number).name == name for number, (name, *_) in KINDS.items())


@pytest.mark.parametrize("kind", ["Q4_K", "BF16", "F64"])
def test_rows_are_read_in_the_order_that_the_model_has(kind: str, tmp_path: Path) -> None:
    numbers, order = (
        np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32),
        np.array([3, 1, 5, 0, 2, 4]),
    )
    blocks = random_blocks("Q4_K", ROWS, WIDTH, np.random.default_rng(0))
    stored = {
        "Q4_K": blocks,
        "BF16": (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8),
        "F64": numbers.astype("<f8").view(np.uint8),
    }[kind]
    expected = {"Q4_K": by_ggml("Q4_K", blocks), "F64": numbers}.get(
        kind, (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    )
    weight = weight_of(kind, stored, tmp_path, order)
    assert np.array_equal(weight.dequantised(slice(1, 4)), expected[order][1:4])
    weight.release()
    assert np.array_equal(weight.dequantised(order), expected[order][order])


def test_numbers_that_are_not_finite_name_the_tensor(tmp_path: Path) -> None:
    blocks = random_blocks("Q8_0", ROWS, WIDTH, np.random.default_rng(0))
    blocks[3] = 0xFF
    with pytest.raises(
        ModelLoadError, match=r"blk\.0\.attn_q\.weight in .*blocks\.bin has numbers that are not finite"
    ):
        weight_of("Q8_0", blocks, tmp_path).dequantised(slice(None))


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
