"""The short causal convolution of recurrent layers (LFM2 has nothing else) over the rows of several trees.

A row sees the inputs of its last ancestors. The state is a window: the inputs of the last committed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from precedent_models.recurrent.states import Path, State


class WindowStep:
    """What is kept of a forward: every row's input, `[channels, rows]`."""

    divisible = True

    def __init__(self, inputs: Tensor, width: int) -> None:
        self._inputs, self._width = inputs, width

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self._inputs.nbytes

    def state_after(self, state: State | None, path: Path) -> State:
        """The last `width` inputs, `[channels, width]`, zeros before the first token."""
        rows = path.on(self._inputs.device)[-self._width :]
        new = self._inputs[:, rows]
        return (torch.cat([window_of(state, self._inputs, self._width)[:, new.shape[1] :], new], dim=1),)


def window_of(state: State | None, inputs: Tensor, width: int) -> Tensor:
    """The inputs before the first row, `[channels, width]`."""
    return inputs.new_zeros((inputs.shape[0], width)) if state is None else state[0]


def over_windows(line: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[channels, rows]`: each row's window of a line of inputs `[channels, inputs]`, times `weight`.

    `windows` `[rows, width]` tells where its inputs are; sums are in at least float32.
    """
    precise = torch.promote_types(weight.dtype, torch.float32)
    output = (line[:, windows].to(precise) * weight.to(precise)[:, None]).sum(-1)
    return output if bias is None else output + bias.to(precise)[:, None]


def over_line(line: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[channels, rows]` of a chain, whose inputs follow the window in `line` `[channels, width + rows]`."""
    return conv1d(line[None], weight[:, None], bias, groups=weight.shape[0])[0]
