"""Memory of KV caches on a CPU, in pages of its own, which go from freed buffers to new ones.

Buffers come and go in sizes that grow with their conversations. In C's heap they leave holes between what lives longer,
and a server's memory grows for hours; fresh pages from the system for each of them would cost a millisecond a request.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from math import prod

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.process import Lock

SMALLEST = 128 * 2**10
"""Bytes below which a buffer comes from the heap: the system lends a process only some ten thousand mappings."""

MOST_SPARE = 64 * 2**20
"""Bytes that wait for new buffers; beyond them freed memory goes back to the system, the longest spare first."""

STEPS = 8
"""Sizes between a power of two and the next, so that most freed buffers fit most new ones."""


class Recycler:
    """Lends memory that comes back when no tensor uses it any more, whichever thread drops the last one."""

    def __init__(self, most_spare: int = MOST_SPARE) -> None:
        self._most_spare = most_spare
        self._given_back: deque[mmap.mmap] = deque()
        self._spare: list[mmap.mmap] = []
        self._lock = Lock()

    @property
    def spare_bytes(self) -> int:
        """Bytes that wait for new buffers."""
        with self._lock:
            self._settle()
            return sum(map(len, self._spare))

    def lend(self, num_bytes: int) -> Tensor:
        """Memory of so many bytes, `[num_bytes]` uint8, with whatever it held before."""
        step = max(mmap.PAGESIZE, (1 << (num_bytes.bit_length() - 1)) // STEPS)
        size = -(-num_bytes // step) * step
        with self._lock:
            self._settle()
            memory = next((memory for memory in reversed(self._spare) if len(memory) == size), None)
            if memory is not None:
                self._spare.remove(memory)
        if memory is None:
            memory = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)  # a copy: no child shares it
        lent = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
        weakref.finalize(lent, self._given_back.append, memory).atexit = False
        return torch.from_numpy(lent)

    def _settle(self) -> None:
        """Take up what came back; what is spare beyond the bound goes to the system."""
        while self._given_back:
            self._spare.append(self._given_back.popleft())
        excess = sum(map(len, self._spare)) - self._most_spare
        while excess > 0:
            excess -= len(self._spare.pop(0))


_RECYCLER = Recycler()


def empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory as `torch.empty` gives it."""
    num_bytes = prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes < SMALLEST:
        return torch.empty(size, dtype=dtype, device=device)
    return _RECYCLER.lend(num_bytes).view(dtype).view(size)
