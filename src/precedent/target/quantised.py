"""Weights that stay as a file stores them: as core knows them, which does not compute with their codes.

`ModelSupport.quantised_layer` makes the layers that do; without a package, such weights become ordinary ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from precedent.errors import UnsupportedError

Rows = slice | NDArray[np.int64]
"""Outputs of a weight: a range, or their numbers."""

BAND = 512
"""Outputs that are dequantised at once."""


class QuantisedWeight(ABC):
    """A weight `[out_features, in_features]` of a linear layer or an embedding, where it is stored.

    A layer that computes with one has it as `quantised`.
    `name` is the tensor's name in its file and `kind` its type there (`Q4_K`, `AWQ`), for messages. `packed` is free
    for the package that computes with the weight: one weight may serve an embedding and the head. A copy is the weight
    itself: nothing changes it.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    packed: object | None = None

    @abstractmethod
    def dequantised(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as numbers, `[outputs, in_features]`. Raises ModelLoadError, naming the tensor, for NaN."""

    def numbers(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as the numbers that were quantised where those are stored, else as dequantised ones."""
        return self.dequantised(which)

    @property
    @abstractmethod
    def stored(self) -> NDArray[Any]:
        """The numbers that are stored, in any shape: two weights of one kind and shape are equal if these are."""

    @property
    def nbytes(self) -> int:
        """Bytes where it is stored."""
        return int(self.stored.nbytes)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.out_features, self.in_features

    def release(self) -> None:  # noqa: B027
        """Tell the system that the stored pages are not needed for now: a copy laid out for kernels replaces them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the plain parts, as torch's tensors of several parts do: fingerprints read them."""
        return ["stored"], None

    def __deepcopy__(self, memo: Any) -> QuantisedWeight:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.name} is read where it is stored and cannot be pickled: load the model in the other process"
        )


def rows_of(module: Any, ids: Tensor | slice) -> Tensor:
    """Rows of the weight of a linear layer or an embedding, `[rows, in_features]`; in float32 where it is quantised."""
    weight = getattr(module, "quantised", None)
    if not isinstance(weight, QuantisedWeight):
        return cast(Tensor, module.weight.detach()[ids])
    if isinstance(ids, slice):
        return torch.from_numpy(weight.dequantised(ids))
    return torch.from_numpy(weight.dequantised(ids.reshape(-1).cpu().numpy())).view(*ids.shape, weight.in_features)


def is_quantised(model: nn.Module) -> bool:
    """Whether some of a model's layers compute with quantised weights."""
    return any(isinstance(getattr(module, "quantised", None), QuantisedWeight) for module in model.modules())
