"""The only source of random numbers.

They are counter-based: a number depends only on (request entropy, step, node, purpose). So they can be requested in any
order, and drafting and verification never share one.
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
    """Makes random decisions. Tests replay every decision by implementing these two methods."""

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """True with `probability`."""

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """An index sampled in proportion to the non-negative `weights`, `[vocab_size]`."""


@runtime_checkable
class KeyedRng(Rng, Protocol):
    """Random numbers that depend only on (node, purpose), so they can be computed in advance (`CounterRng`)."""

    def uniforms(self, nodes: Iterable[int], purpose: str) -> NDArray[np.float64]:
        """A uniform number in [0, 1) for each node, `[num_nodes]`."""


RngOf = Callable[[int], Rng]
"""Step number to that step's random numbers."""


class CounterRng:
    """Random numbers of one step: a hash of (step, node, purpose), keyed by the request's entropy, 53 bits each."""

    def __init__(self, entropy: int, step: int) -> None:
        key = hashlib.blake2b(str(entropy).encode(), digest_size=16).digest()  # any int is a seed
        self._keyed, self._step = hashlib.blake2b(digest_size=8, key=key), step

    def uniform(self, node: int, purpose: str) -> float:
        """A uniform number in [0, 1)."""
        return (int.from_bytes(self._bits(node, purpose.encode()), "little") >> 11) * 2.0**-53

    def uniforms(self, nodes: Iterable[int], purpose: str) -> NDArray[np.float64]:
        """`uniform` for several nodes, `[num_nodes]`."""
        encoded = purpose.encode()
        bits = np.frombuffer(b"".join([self._bits(node, encoded) for node in nodes]), "<u8")
        numbers: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53, dtype=np.float64)
        return numbers

    def _bits(self, node: int, purpose: bytes) -> bytes:
        hashed = self._keyed.copy()
        hashed.update(_COUNTERS.pack(self._step, node) + purpose)
        return hashed.digest()

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """True with `probability`; the strict comparison never accepts probability 0."""
        return self.uniform(node, purpose) < probability

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """An index, by inverting the cumulative sum in float64."""
        cumulative = weights.to(torch.float64).cumsum(0)
        threshold = self.uniform(node, purpose) * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, threshold, right=True))
        if index < weights.numel():
            return index
        return int(weights.nonzero()[-1])  # the threshold was rounded up to the total mass: the last token with mass


def categorical_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`CounterRng.categorical` for every row of `weights` `[rows, vocab_size]`, with one of `uniforms` `[rows]` each.

    Returns token ids `[rows]` on the device; reads nothing back. A row without mass gives an arbitrary id.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    whole = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms[:, None] * whole, right=True)
    last = torch.searchsorted(cumulative, whole).clamp_(max=weights.shape[-1] - 1)  # the last token with mass
    return torch.minimum(index, last)[:, 0]


def entropy_rng(entropy: int) -> RngOf:
    """Counter-based random numbers for every step, keyed by 128 bits of entropy."""
    return lambda step: CounterRng(entropy, step)
