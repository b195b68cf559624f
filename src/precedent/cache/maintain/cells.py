"""Parses the rows of one page of an SQLite file from the page alone, without following the tree to it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from precedent.cache.store.pages import HEADER_BYTES, Pages

TABLE_LEAF, INDEX_LEAF = 0x0D, 0x0A
CONSTANTS = {0: None, 8: 0, 9: 1}
"""Values that take no bytes, by their serial type."""

INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Bytes of integers by their serial type."""


class Row(NamedTuple):
    """A row of a table, or of an index (then `rowid` is 0)."""

    rowid: int
    values: tuple[Any, ...]


def rows_on(number: int, pages: Pages) -> Iterator[Row]:
    """The rows on a page, with their overflow pages; rows that cannot be read are left out."""
    data = pages.page(number)
    if data is None:
        return
    begin = HEADER_BYTES if number == 1 else 0
    if data[begin] not in (TABLE_LEAF, INDEX_LEAF):
        return
    for place in range(int.from_bytes(data[begin + 3 : begin + 5], "big")):
        at = begin + 8 + 2 * place
        try:
            yield _row(data, int.from_bytes(data[at : at + 2], "big"), data[begin], pages)
        except (IndexError, ValueError, struct.error):
            continue


def _row(data: bytes, at: int, kind: int, pages: Pages) -> Row:
    size, at = _varint(data, at)
    rowid, at = _varint(data, at) if kind == TABLE_LEAF else (0, at)
    return Row(_signed(rowid), _values(_payload(data, at, size, kind, pages)))


def _payload(data: bytes, at: int, size: int, kind: int, pages: Pages) -> bytes:
    """All bytes of a row: on its own page, and on its overflow pages."""
    usable = len(data)
    least = (usable - 12) * 32 // 255 - 23
    most = usable - 35 if kind == TABLE_LEAF else (usable - 12) * 64 // 255 - 23
    here = least + (size - least) % (usable - 4)
    here = size if size <= most else here if here <= most else least
    parts, left = [data[at : at + here]], size - here
    following = int.from_bytes(data[at + here : at + here + 4], "big") if left else 0
    while left > 0:
        further = pages.followed(following)
        if further is None:
            raise ValueError("the row continues on a page that does not exist")
        parts.append(further[4 : 4 + min(left, usable - 4)])
        left -= len(parts[-1])
        following = int.from_bytes(further[:4], "big")
    return b"".join(parts)


def _values(payload: bytes) -> tuple[Any, ...]:
    end, at = _varint(payload, 0)
    types = []
    while at < end:
        kind, at = _varint(payload, at)
        types.append(kind)
    values = []
    for kind in types:
        value, end = _value(payload, end, kind)
        values.append(value)
    return tuple(values)


def _value(payload: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value and its end."""
    if kind in CONSTANTS:
        return CONSTANTS[kind], at
    size = INTEGERS.get(kind, 8 if kind == 7 else (kind - 12) // 2)
    data = payload[at : at + size]
    if len(data) < size or kind in (10, 11):
        raise ValueError("the row is truncated")
    if kind in INTEGERS:
        return int.from_bytes(data, "big", signed=True), at + size
    if kind == 7:
        return struct.unpack(">d", data)[0], at + size
    return data.decode("utf-8", "replace") if kind % 2 else data, at + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of one to nine bytes, and its end."""
    number = 0
    for place in range(at, at + 8):
        number = number << 7 | data[place] & 0x7F
        if data[place] < 0x80:
            return number, place + 1
    return number << 8 | data[at + 8], at + 9


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
