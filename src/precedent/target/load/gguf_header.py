"""Reads the header of a GGUF file in milliseconds, without its tensors and without the package gguf.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from precedent.errors import ModelLoadError

MAGIC = b"GGUF"

VERSIONS = (2, 3)

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the type's number."""

_TEXT, _ARRAY = 8, 9


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(file: Path) -> dict[str, Any]:
    """The metadata: numbers and texts by key, and arrays of texts as lists; other arrays are left out.

    Raises ModelLoadError for a file of another format or version, or one that ends within its header.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _metadata(content)
    except (OSError, ValueError, OverflowError) as error:
        raise ModelLoadError(f"{file} is no GGUF file that can be read ({error}): copy or download it again") from error


def _metadata(content: mmap.mmap) -> dict[str, Any]:
    if _bytes(content, len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = _number(content, "I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, not one of {VERSIONS}")
    _, count = _number(content, "Q"), _number(content, "Q")
    found = ((_text(content), _value(content, _number(content, "I"))) for _ in range(count))
    return {key: value for key, value in found if value is not None}


def _value(content: mmap.mmap, kind: int) -> Any:
    if kind == _TEXT:
        return _text(content)
    if kind != _ARRAY:
        return _number(content, _format(kind))
    inner, count = _number(content, "I"), _number(content, "Q")
    if inner == _TEXT:
        return [_text(content) for _ in range(count)]
    _bytes(content, count * struct.calcsize(_format(inner)))
    return None


def _text(content: mmap.mmap) -> str:
    return _bytes(content, _number(content, "Q")).decode("utf-8", "replace")


def _number(content: mmap.mmap, kind: str) -> Any:
    return struct.unpack(f"<{kind}", _bytes(content, struct.calcsize(f"<{kind}")))[0]


def _bytes(content: mmap.mmap, length: int) -> bytes:
    read = content.read(length)
    if len(read) < length:
        raise ValueError("it ends within its header")
    return read


def _format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _NUMBERS[kind]
