"""One forward as recurrent layers see it: each sequence's rows, its states, and how its rows descend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from precedent.errors import UnsupportedError
from precedent.runtime.placing import placed
from precedent.target.kv.rows import ForwardPass, Rows, announced
from precedent_models.recurrent.branches import Branches, WindowStep, over_line, over_windows, window_of
from precedent_models.recurrent.states import Key, RecurrentStates, states_of


class Part(NamedTuple):
    """One sequence: its states, the span of its rows, and how they descend."""

    states: RecurrentStates
    start: int
    stop: int
    branches: Branches


class RecurrentStep:
    """The part of a forward that recurrent modules compute; `inside` tells it which module runs."""

    def __init__(self, forward: ForwardPass) -> None:
        self.forward = forward
        self.parts, self._windows = cache(self._parts), cache(self._all_windows)
        self._module = 0, 0
        self._calls = 0

    def running(self) -> AbstractContextManager[None]:
        """Announce this step to the recurrent modules."""
        return announced(_RUNNING, self)

    def inside(self, module: tuple[int, int]) -> None:
        """From now on the module of this layer, with this index in it, computes."""
        self._module, self._calls = module, 0

    def next_key(self) -> Key:
        """The key of the state that the running module uses next."""
        self._calls += 1
        return *self._module, self._calls

    def scan(self, inputs: Any, family: Any, device: torch.device) -> list[Tensor]:
        """Each sequence's outputs of a recurrence, by `over_tree` of its family."""
        key, outputs = self.next_key(), list[Tensor]()
        for part in self.parts(device):
            own = inputs if len(self.forward.sequences) == 1 else inputs.at(slice(part.start, part.stop))
            output, step = family.over_tree(own, part.states.of(key), part.branches)
            part.states.put(key, step)
            outputs.append(output)
        return outputs

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A causal convolution of `inputs` `[channels, rows]` with `weight` `[channels, width]`, `[channels, rows]`."""
        key, width, pieces = self.next_key(), weight.shape[1] - 1, list[Tensor]()
        for part in self.parts(inputs.device):
            own = inputs[:, part.start : part.stop]
            pieces += [window_of(part.states.of(key), inputs, width), own]
            part.states.put(key, WindowStep(own, width))
        line, parts = torch.cat(pieces, dim=1), self.parts(inputs.device)
        if len(parts) == 1 and parts[0].branches.is_chain:
            return over_line(line, weight, bias)
        return over_windows(line, self._windows(width + 1, inputs.device), weight, bias)

    def _parts(self, device: torch.device) -> list[Part]:
        return [
            Part(states_of(rows.kv), *span, Branches.of(rows.ancestors, len(rows), device))
            for rows, span in zip(self.forward.sequences, self.forward.spans, strict=True)
        ]

    def _all_windows(self, width: int, device: torch.device) -> Tensor:
        """`Branches.windows` of all sequences, in the line of all their windows and rows."""
        found = [
            part.branches.windows(width) + part.start + number * (width - 1)
            for number, part in enumerate(self.parts(device))
        ]
        return placed(np.concatenate(found), device)

    def alone(self, module: object) -> Rows:
        """The rows of the only sequence. Raises UnsupportedError if they are several sequences, or no chain."""
        (rows,) = self.forward.sequences[:1]
        is_chain = rows.ancestors is None or rows.depths[-1] == len(rows) - 1
        if len(self.forward.sequences) > 1 or not is_chain:
            raise UnsupportedError(f"{type(module).__name__} has a state that follows one chain of tokens, not a tree")
        return rows


_RUNNING: ContextVar[RecurrentStep | None] = ContextVar("precedent_recurrent_step", default=None)


def running_step() -> RecurrentStep | None:
    """The step that this thread is running; None outside of `RecurrentStep.running`."""
    return _RUNNING.get()


def the_step() -> RecurrentStep:
    """The step that this thread is running."""
    step = _RUNNING.get()
    assert step is not None, "a recurrence of ours was called outside of our forwards"
    return step
