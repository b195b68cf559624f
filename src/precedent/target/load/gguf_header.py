"""Reads the header of a GGUF file in milliseconds, without its tensors and without the package gguf.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from precedent.errors import ModelLoadError

MAGIC = b"GGUF"

VERSIONS = (2, 3)

KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Types of tensors by their number: name, weights in a block, and bytes of a block."""

END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Metadata of a tokenizer that names tokens which end a text, a turn, or a message."""

SAMPLING_KEYS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Recommended sampling settings in a header, below `general.sampling`, and their names in a generation config."""

MOST_DIMENSIONS = 4
ALIGNMENT = "general.alignment"

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the type's number."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in its file. `shape` has torch's order: the last dimension is contiguous."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parts_of(file: Path) -> list[Path]:
    """The files of a model in several parts, by the name of one of them; the file itself if it is not named as one."""
    found = _PART.fullmatch(file.name)
    if found is None or not int(found[3]):
        return [file]
    stem, _, count = found.groups()
    return [file.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_header(file: Path) -> dict[str, Any]:
    """The metadata: numbers and texts by key, arrays as lists.

    Raises ModelLoadError for a file of another format or version, or one that ends within its header.
    """
    return _read(file, with_tensors=False)[0]


def end_tokens_in(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the tokens that end an answer, by the metadata keys that name them."""
    found = {name: metadata.get(f"tokenizer.ggml.{name}") for name in END_TOKEN_KEYS}
    return {name: token for name, token in found.items() if isinstance(token, int) and token >= 0}


def sampling_in(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The sampling settings that the metadata recommends, by their names in a generation config."""
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    given = {name: value for name, value in found.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


def read_directory(file: Path) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
    """The metadata, and the place of every tensor; none reaches beyond the file or into another.

    Raises ModelLoadError, naming the tensor, for a type that is not known, a shape that does not fit the type or the
    file, and a place where another tensor lies.
    """
    return _read(file, with_tensors=True)


def _read(file: Path, *, with_tensors: bool) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            num_tensors, metadata = _metadata(content)
            tensors = _tensors(content, num_tensors, metadata.get(ALIGNMENT, 32)) if with_tensors else ()
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise ModelLoadError(f"{file} is no GGUF file that can be read ({error}): copy or download it again") from error
    return metadata, tensors


def _metadata(content: mmap.mmap) -> tuple[int, dict[str, Any]]:
    if _bytes(content, len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = _number(content, "I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise ValueError(
            "it is big-endian: convert it on a machine of that kind, or get the little-endian file"
            if swapped in VERSIONS
            else f"its version is {version}, not one of {VERSIONS}"
        )
    num_tensors, count = _number(content, "Q"), _number(content, "Q")
    found = ((_text(content), _value(content, _number(content, "I"))) for _ in range(count))
    return num_tensors, dict(found)


def _tensors(content: mmap.mmap, count: int, alignment: Any) -> tuple[TensorEntry, ...]:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}, and not a power of two")
    found = [_entry(content) for _ in range(count)]
    begin = -(-content.tell() // alignment) * alignment
    entries = [_checked(*each, begin, alignment, len(content)) for each in found]
    for one, following in zip(by_place := sorted(entries, key=lambda each: each.start), by_place[1:], strict=False):
        if one.start + one.nbytes > following.start:
            raise ValueError(
                f"the tensor {one.name} of {one.nbytes:,} bytes reaches into {following.name}: its shape is wrong"
            )
    if len({each.name for each in entries}) < count:
        raise ValueError("two of its tensors have the same name")
    return tuple(entries)


def _entry(content: mmap.mmap) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = _text(content), _number(content, "I")
    if not 1 <= rank <= MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name} has {rank} dimensions")
    sizes = struct.unpack(f"<{rank}Q", _bytes(content, 8 * rank))
    return name, sizes[::-1], _number(content, "I"), _number(content, "Q")


def _checked(
    name: str, shape: tuple[int, ...], number: int, offset: int, begin: int, alignment: int, end: int
) -> TensorEntry:
    """The entry of a tensor whose offset counts from `begin`. Raises ValueError unless it ends before `end`."""
    if number not in KINDS:
        raise ValueError(f"the tensor {name} has the unknown type {number}")
    kind, block, size = KINDS[number]
    if shape[-1] % block or 0 in shape:
        raise ValueError(
            f"the tensor {name} of type {kind} has the shape {shape}, which is no row of blocks of {block}"
        )
    nbytes, start = prod(shape) // block * size, begin + offset
    if offset % alignment:
        raise ValueError(f"the tensor {name} begins at {offset}, which is no multiple of {alignment}")
    if start + nbytes > end:
        raise ValueError(
            f"the tensor {name} of shape {shape} would end at byte {start + nbytes:,} of {end:,}: the file is cut "
            "short or damaged"
        )
    return TensorEntry(name, kind, shape, start, nbytes)


def _value(content: mmap.mmap, kind: int) -> Any:
    if kind == _TEXT:
        return _text(content)
    if kind != _ARRAY:
        return _number(content, _format(kind))
    inner, count = _number(content, "I"), _number(content, "Q")
    if inner == _TEXT:
        return _texts(content, count)
    dtype = np.dtype(f"<{_format(inner)}")
    return np.frombuffer(_bytes(content, count * dtype.itemsize), dtype).tolist()


def _texts(content: mmap.mmap, count: int) -> list[str]:
    """Texts one after the other. A vocabulary has hundreds of thousands, so nothing is called that is not needed."""
    found, place, end = [], content.tell(), len(content)
    if count > end:
        raise ValueError("it ends within its header")
    for _ in range(count):
        (length,) = _LENGTH(content, place)
        first, place = place + 8, place + 8 + length
        if place > end:
            raise ValueError("it ends within its header")
        found.append(str(content[first:place], "utf-8", "replace"))
    content.seek(place)
    return found


def _text(content: mmap.mmap) -> str:
    return _bytes(content, _number(content, "Q")).decode("utf-8", "replace")


def _number(content: mmap.mmap, kind: str) -> Any:
    return struct.unpack(f"<{kind}", _bytes(content, struct.calcsize(f"<{kind}")))[0]


def _bytes(content: mmap.mmap, length: int) -> bytes:
    if length > len(content) - content.tell():
        raise ValueError("it ends within its header")
    return content.read(length)


def _format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _NUMBERS[kind]
