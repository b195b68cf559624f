"""The only place where logits become probabilities, and the only place where coins come from.

Randomness is counter-based: a coin depends on (request entropy, step, node, purpose) and on nothing else, so the order
in which coins are asked for does not matter and the coins of drafting and verifying never meet.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.config import SamplingParams

INFINITY, NEGATIVE_INFINITY = 0x7F80, 0xFF80  # as bits of bfloat16
COLDEST = 1e-30  # below this temperature float32 logits overflow; one-hot (shared by exact ties) long before


_COUNTERS = struct.Struct("<qq")


class Coins(Protocol):
    """Where random decisions come from. Tests replay every decision by implementing these two methods."""

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """True with `probability`."""

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """An index drawn in proportion to the non-negative `weights`, `[vocab_size]`."""


@runtime_checkable
class KnownCoins(Coins, Protocol):
    """Coins that are functions of (node, purpose) alone (`CounterCoins`)."""

    def uniforms(self, nodes: Iterable[int], purpose: str) -> NDArray[np.float64]:
        """A uniform number in [0, 1) for each of the nodes, `[nodes]`."""


class CounterCoins:
    """Coins of one step: a keyed hash of (step, node, purpose) under the request's entropy, 53 bits each."""

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
        """An index drawn by inversion of the cumulative sum, in float64."""
        cumulative = weights.to(torch.float64).cumsum(0)
        threshold = self.uniform(node, purpose) * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, threshold, right=True))
        if index < weights.numel():
            return index
        return int(weights.nonzero()[-1])  # the product was rounded up to the whole mass: the last token that has some


def categorical_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`CounterCoins.categorical` for every row of `weights` `[rows, vocab_size]` by its own number of `uniforms`.

    Token ids `[rows]`, on the device; nothing is read back. A row without mass gives any id.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    whole = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms[:, None] * whole, right=True)
    last = torch.searchsorted(cumulative, whole).clamp_(max=weights.shape[-1] - 1)  # the last token that has some mass
    return torch.minimum(index, last)[:, 0]


def largest_id(row: Tensor) -> int:
    """The lowest id of the largest number of a row `[vocab_size]`, or of a NaN if one is there."""
    return largest(row)[1] if row.is_cpu else int(row.argmax())  # the number itself would cost a GPU another wait


def largest(row: Tensor) -> tuple[float, int]:
    """The largest number of a row `[vocab_size]`, or a NaN if one is there, and the lowest id that has it."""
    if not row.is_cpu:
        value, token = torch.stack([number.double() for number in row.max(-1)]).tolist()
        return value, int(token)
    values = row.detach()
    if row.dtype == torch.bfloat16:
        bits = values.view(torch.int16).numpy()
        token = int(bits.argmax())
        # Bits of positive numbers are ordered as the numbers are, those of NaN lie above infinity's, whatever the sign.
        if 0 < bits[token] <= INFINITY and bits.view(np.uint16).max() <= NEGATIVE_INFINITY:
            return float(values[token]), token
    wide = values if row.dtype in (torch.float32, torch.float64) else values.float()
    numbers = wide.numpy()
    token = int(numbers.argmax())  # several times as fast as torch's, most of all in bfloat16
    return float(numbers[token]), token


def probs_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities of logits `[..., vocab_size]` under `params` (temperature, top-k, top-p, min-p in this order).

    float32, or float64 for float64 logits. At temperature 0 a row is one-hot at the argmax (lowest id on ties).
    The order and the meaning of the warpers are those of transformers' logits processors.
    """
    rows = logits if logits.dtype == torch.float64 else logits.float()
    if params.greedy:
        return torch.zeros_like(rows).scatter_(-1, rows.argmax(-1, keepdim=True), 1.0)
    rows = rows / max(params.temperature, COLDEST)
    if params.top_k:
        rows = _keep_top_k(rows, params.top_k)
    probs = rows.softmax(-1)
    if params.top_p < 1.0:
        probs = _keep_top_p(probs, params.top_p)
    if params.min_p > 0.0:
        probs = torch.where(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0, probs)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _keep_top_k(rows: Tensor, top_k: int) -> Tensor:
    smallest_kept = rows.topk(min(top_k, rows.shape[-1])).values[..., -1:]
    return rows.masked_fill(rows < smallest_kept, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    ordered, index = probs.sort()  # ascending, as transformers does: the tail whose mass is <= 1 - top_p goes
    dropped = ordered.cumsum(-1) <= 1.0 - top_p
    dropped[..., -1] = False
    kept = probs.masked_fill(torch.zeros_like(dropped).scatter_(-1, index, dropped), 0.0)
    return kept / kept.sum(-1, keepdim=True)
