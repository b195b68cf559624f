"""Finds operations that would make the host wait for a GPU; works on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "item": "a number is read",
    "_local_scalar_dense": "a number is read",
    "is_nonzero": "a branch depends on a number",
    "equal": "whole tensors are compared",
    "nonzero": "a size depends on data",
    "masked_select": "a size depends on data",
    "_unique2": "a size depends on data",
    "unique_dim": "a size depends on data",
    "resolve_neg": "a tensor is read as a list or an array",
}
"""Operations that make the host wait, and why. Indexing with a mask is another: the GPU must count its result first."""

MASK = "index"


class HostWaits(TorchDispatchMode):
    """Records in `names` every operation inside that would make the host wait for a GPU.

    On a CPU, reading a list (`tolist`, `numpy`) shows as `resolve_neg`, and only in inference mode. Copies to the
    device are not recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or (name.startswith(MASK) and _is_mask(args)):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @property
    def reasons(self) -> str:
        """Why the host waits, in words; empty if it never does."""
        return ", ".join(sorted({f"{name}: {WAITS.get(name, 'a size depends on data')}" for name in self.names}))


def _is_mask(args: Any) -> bool:
    """Whether one of the indices of `index(tensor, indices)` or `index_put(tensor, indices, values)` is boolean."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
