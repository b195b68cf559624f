"""Random numbers: the only place they come from.

They are counter-based: a number depends on (request entropy, step, node, purpose) and on nothing else. So the order in
which numbers are asked for does not matter, and those of drafting and of verifying never meet.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COUNTERS = struct.Struct("<qq")


class Rng(Protocol):
    """Random decisions. Tests replay every decision by implementing these two methods."""

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """True with `probability`."""

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """An index sampled in proportion to the non-negative `weights`, `[vocab_size]`."""


@runtime_checkable
class KeyedRng(Rng, Protocol):
    """Random numbers that are functions of (node, purpose) alone, and so known beforehand (`CounterRng`)."""

    def uniforms(self, nodes: Iterable[int], purpose: str) -> NDArray[np.float64]:
        """A uniform number in [0, 1) for each of the nodes, `[nodes]`."""


RngOf = Callable[[int], Rng]
"""The random numbers of a step, by the step's number."""


class CounterRng:
    """Random numbers of one step: a keyed hash of (step, node, purpose) under the request's entropy, 53 bits each."""

    def __init__(self, entropy: int, step: int) -> None:
        key = hashlib.blake2b(str(entropy).encode(), digest_size=16).digest()  # any int is a seed
        self._keyed, self._step = hashlib.blake2b(digest_size=8, key=key), step

    def uniform(self, node: int, purpose: str) -> float:
        """A uniform number in [0, 1)."""
        return (int.from_bytes(self._bits(node, purpose.encode()), "little") >> 11) * 2.0**-53

    def uniforms(self, nodes: Iterable[int], purpose: str) -> NDArray[np.float64]:
        """`uniform` of several nodes, `[nodes]`."""
        encoded = purpose.encode()
        bits = np.frombuffer(b"".join([self._bits(node, encoded) for node in nodes]), "<u8")
        numbers: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53, dtype=np.float64)
        return numbers

    def _bits(self, node: int, purpose: bytes) -> bytes:
        hashed = self._keyed.copy()
        hashed.update(_COUNTERS.pack(self._step, node) + purpose)
        return hashed.digest()

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """True with `probability`; the comparison is strict, so that probability 0 is never accepted."""
        return self.uniform(node, purpose) < probability

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """An index by inversion of the cumulative sum, in float64."""
        cumulative = weights.to(torch.float64).cumsum(0)
        threshold = self.uniform(node, purpose) * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, threshold, right=True))
        if index < weights.numel():
            return index
        return int(weights.nonzero()[-1])  # the product was rounded up to the whole mass: the last token that has some


def categorical_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`CounterRng.categorical` for every row of `weights` `[rows, vocab_size]` by its own number of `uniforms`.

    Token ids `[rows]`, on the device; nothing is read back. A row without mass gives any id.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    whole = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms[:, None] * whole, right=True)
    last = torch.searchsorted(cumulative, whole).clamp_(max=weights.shape[-1] - 1)  # the last token that has some mass
    return torch.minimum(index, last)[:, 0]


def entropy_rng(entropy: int) -> RngOf:
    """Counter-based random numbers for every step, keyed by 128 bits of entropy."""
    return lambda step: CounterRng(entropy, step)
