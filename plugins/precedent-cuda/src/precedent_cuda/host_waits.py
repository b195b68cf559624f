"""Finds operations that would make the host wait for a GPU; works on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = frozenset({
    "item", "_local_scalar_dense", "is_nonzero", "equal", "resolve_neg", "nonzero", "masked_select", "_unique2",
    "unique_dim",
})  # fmt: skip
"""Operations that read a number, or whose result's size depends on data.

On a CPU, reading a list (`tolist`, `numpy`) shows as `resolve_neg`, and only in inference mode.
"""


class HostWaits(TorchDispatchMode):
    """Records in `names` every operation inside that would make the host wait for a GPU, but for copies to the device.

    Indexing with a mask is one: the GPU must count its result first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if name in WAITS or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
