"""Reads the header of a GGUF file in milliseconds, without its tensors and without the package gguf.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from precedent.errors import ModelLoadError
from precedent.target.load.gguf import MAGIC

VERSIONS = (2, 3)

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the type's number."""

_TEXT, _ARRAY = 8, 9


def read_header(file: Path) -> dict[str, Any]:
    """The metadata: numbers and texts by key, and arrays of texts as lists; other arrays are left out.

    Raises ModelLoadError for a file of another format or version, or one that ends within its header.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(content).metadata()
    except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelLoadError(f"{file} is no GGUF file that can be read ({error}): copy or download it again") from error


class _Cursor:
    """A place in a header."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0

    def metadata(self) -> dict[str, Any]:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not one of {VERSIONS}")
        _, count = self._number("Q"), self._number("Q")
        found = ((self._text(), self._value(self._number("I"))) for _ in range(count))
        return {key: value for key, value in found if value is not None}

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(_format(kind))
        inner, count = self._number("I"), self._number("Q")
        if inner == _TEXT:
            return [self._text() for _ in range(count)]
        if inner == _ARRAY:
            raise ValueError("it holds an array of arrays")
        self._bytes(count * struct.calcsize(_format(inner)))
        return None

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._content, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", "replace")

    def _bytes(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._content):
            raise ValueError("it ends within its header")
        read, self._at = self._content[self._at : end], end
        return read


def _format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _NUMBERS[kind]
