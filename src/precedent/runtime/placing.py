"""Copies numbers from the host to a device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def placed(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on `device`; on a CPU it shares their memory.

    For CUDA they pass through pinned memory, which torch reuses only after the copy. A copy from pageable memory would
    make the host wait for all earlier work.
    """
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
