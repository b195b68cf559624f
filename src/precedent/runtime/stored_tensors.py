"""The plain tensors in which a weight is stored, whatever tensor type a quantiser wrapped around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def stored_tensors(weight: Any) -> Iterator[Any]:
    """Yield the plain tensors of a weight: itself, or the parts of a tensor type made of others, such as torchao's.

    A dense view of such a weight would be a dequantised copy, and its type need not support one.
    """
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield weight
        return
    for name in flatten()[0]:
        yield from stored_tensors(getattr(weight, name))
