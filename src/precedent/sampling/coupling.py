"""Coupled sampling: a sample from a distribution that depends only on the distribution and on (seed, position).

It is the Gumbel-max trick without logarithms: `argmax(probs / noise)` with standard exponential noise. Two models that
choose with the same seed and position agree far more often than two that sample independently (Daliri et al.
2408.07978). A token's noise is a hash of (seed, position, token id), so any device can compute it on its own.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.runtime.compiled import compiled

SMALLEST = 2.0**-54  # half the step of a uniform number in [0, 1)
STEP = 2.0**-53
AT_ONCE = 1024
"""Tokens hashed in one vectorised loop."""

ROUNDING = 1e-15
"""Larger than the rounding errors of `1 - x` and of a logarithm near 1."""

# SplitMix64 (Steele, Lea and Flood 2014): the increment, and the two factors of its finalizer
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _FIRST, _SECOND = np.uint64(GOLDEN), np.uint64(FIRST), np.uint64(SECOND)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def noise_key(seed: int, position: int) -> int:
    """The 64-bit key of the noise at one output position; any int is a seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest(), "little")


def coupled_choice(probs: Tensor, seed: int, position: int) -> int:
    """A sample from `probs` `[vocab_size]` that depends only on them and (seed, position); the lowest id on ties."""
    wide = probs if probs.dtype in (torch.float32, torch.float64) else probs.float()
    numbers = np.ascontiguousarray(wide.detach().cpu().numpy())
    return int(_choice(numbers, np.uint64(noise_key(seed, position))))


@compiled
def _choice(probs: NDArray[np.floating], key: np.uint64) -> int:
    """`argmax(probs / noise)`; takes logarithms only of tokens that may win.

    To beat `best` a token needs noise below `t = p / best`, that is, a uniform number above `exp(-t) >= 1 - t`.
    """
    best, at, over = 0.0, 0, math.inf
    uniform = np.empty(AT_ONCE, np.float64)
    for first in range(0, probs.size, AT_ONCE):
        count = min(AT_ONCE, probs.size - first)
        for i in range(count):
            hashed = key + np.uint64(first + i + 1) * _GOLDEN
            hashed = (hashed ^ (hashed >> _30)) * _FIRST
            hashed = (hashed ^ (hashed >> _27)) * _SECOND
            uniform[i] = np.float64((hashed ^ (hashed >> _31)) >> _11) * STEP
        for i in range(count):
            p = np.float64(probs[first + i])
            if p > 0.0 and uniform[i] + p * over > 1.0 - ROUNDING:
                ratio = p / -math.log(max(uniform[i], SMALLEST))
                if ratio > best:
                    best, at, over = ratio, first + i, 1.0 / ratio
    return at
