"""The noise of coupled sampling (`precedent.sampling.coupling`) on any device, for many rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.placing import placed
from precedent.sampling.coupling import FIRST, GOLDEN, SECOND, SMALLEST, STEP, noise_key


def coupled_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Standard exponential noise `[vocab_size]` (float64, CPU) that depends only on (seed, position, token id)."""
    return noise_of([noise_key(seed, position)], vocab_size, torch.device("cpu"))[0]


def chosen(probs: Tensor, keys: Sequence[int]) -> Tensor:
    """The choice for each row of `probs` `[rows, vocab_size]`, one key per row: `[rows]`, left on the device."""
    distinct = list(dict.fromkeys(keys))
    noise = noise_of(distinct, probs.shape[-1], probs.device)
    which = placed(np.array([distinct.index(key) for key in keys], dtype=np.int64), probs.device)
    return (probs.to(torch.float64) / noise[which]).argmax(-1)


def noise_of(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """The noise of each key, `[num_keys, vocab_size]` in float64."""
    begun = placed(np.array(keys, dtype=np.uint64).view(np.int64), device)
    hashed = begun[:, None] + torch.arange(1, vocab_size + 1, device=device) * _signed(GOLDEN)
    hashed = (hashed ^ _shifted(hashed, 30)) * _signed(FIRST)
    hashed = (hashed ^ _shifted(hashed, 27)) * _signed(SECOND)
    hashed = hashed ^ _shifted(hashed, 31)
    return exponential(_shifted(hashed, 11).double() * STEP)


def exponential(uniform: Tensor) -> Tensor:
    """Standard exponential numbers from uniform ones in [0, 1), never 0 nor infinite: a probability of 0 never wins."""
    return -uniform.clamp(min=SMALLEST).log()


def _signed(number: int) -> int:
    """The same 64 bits as a signed integer, the only kind that torch computes with."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Logical (unsigned) right shift."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
