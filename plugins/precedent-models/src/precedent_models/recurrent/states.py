"""What the recurrent layers of a model remember of one sequence, beside its keys and values.

A state is a function of all tokens before it, so it cannot be cut back as keys can. A forward therefore leaves the
committed states as they are, and every layer hands in a `LayerStep`: enough to find the state after any accepted path.
States are never modified, only replaced. So a snapshot is a reference, and forks share what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.placing import placed
from precedent.target.kv.cache import KVCache, KVLayer
from precedent.target.kv.shape import SequenceState, StateShape

Key = tuple[int, int, int]
"""Which state: the index of its layer, of its module within the layer, and of the call within the module."""

State = tuple[Tensor, ...]
"""What a layer remembers: a window of inputs, a matrix for each head, or several of them."""

MOST_SNAPSHOTS = 4
"""Earlier lengths that a sequence can go back to, beside those of its last step."""


STATES_HELD = MOST_SNAPSHOTS + 3
"""States of a sequence at most: snapshots, the present one, the one before the last step, and one in the making."""


@dataclass(frozen=True, slots=True)
class PartShape:
    """The shapes and dtypes of one module's state, and the device of its layer."""

    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(prod(size) * dtype.itemsize for size, dtype in zip(self.sizes, self.dtypes, strict=True))

    @classmethod
    def of(cls, state: State) -> PartShape:
        """The shape of a state."""
        return cls(tuple(tuple(part.shape) for part in state), tuple(part.dtype for part in state), state[0].device)


@dataclass(frozen=True)
class RecurrentShape(StateShape):
    """The shapes of all states of a model."""

    states: tuple[tuple[Key, PartShape], ...] = ()
    cache_layer: type[KVLayer] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one state of all layers."""
        return sum(shape.nbytes for _, shape in self.states)

    @property
    def most_bytes(self) -> int:
        """The most bytes that a sequence holds, snapshots included."""
        return STATES_HELD * self.nbytes

    def new(self) -> RecurrentStates:
        """The states of an empty sequence."""
        return RecurrentStates(self)

    def restored(self, parts: Sequence[Tensor]) -> RecurrentStates:
        """States from what `parts` gave. Raises ValueError for tensors of other shapes or dtypes."""
        wanted = [pair for _, shape in self.states for pair in zip(shape.sizes, shape.dtypes, strict=True)]
        if [(tuple(part.shape), part.dtype) for part in parts] != wanted:
            raise ValueError("these recurrent states are not of this model")
        left = iter(parts)
        found = {key: tuple(next(left).to(shape.device) for _ in shape.sizes) for key, shape in self.states}
        return RecurrentStates(self, found)


class Path:
    """Accepted rows of a forward, in order; `[rows]` on the devices that ask for it."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        self.on = cache(self._on)

    def _on(self, device: torch.device) -> Tensor:
        return placed(np.array(self.rows, dtype=np.int64), device)


class LayerStep:
    """One layer's part in a forward: what is kept of it until a path is committed."""

    divisible = True
    """Whether it knows the state after every path, and not only after all of its rows."""

    def __init__(self, *kept: Tensor) -> None:
        self._kept = kept

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(part.nbytes for part in self._kept)

    def state_after(self, state: State | None, path: Path) -> State:
        """The state after the rows of a path, which begins at the first row; `state` is the one before the forward."""
        raise NotImplementedError


class WholeChain(LayerStep):
    """What is kept of a long chain, a piece of a prompt: its last state."""

    divisible = False

    def __init__(self, state: Tensor, count: int) -> None:
        super().__init__(state)
        self._count = count

    def state_after(self, state: State | None, path: Path) -> State:
        """The last state. Raises ValueError for a path that is not the whole chain."""
        if len(path.rows) != self._count:
            raise ValueError("a long chain of tokens is kept whole or not at all")
        return self._kept


States = dict[Key, State]


class _LastStep(NamedTuple):
    """The last commit: length and states before it, and what leads from there to the states now."""

    length: int
    states: States
    steps: dict[Key, LayerStep]
    rows: tuple[int, ...]


class RecurrentStates(SequenceState):
    """The committed states of one sequence, its last forward's steps, and snapshots at a few earlier lengths."""

    def __init__(
        self, of: RecurrentShape, states: States | None = None, snapshots: dict[int, States] | None = None
    ) -> None:
        self._of = of
        self._states: States = states or {}
        self._snapshots: dict[int, States] = snapshots or {}
        self._steps: dict[Key, LayerStep] = {}
        self._last: _LastStep | None = None

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # a number of the base class, which has nothing to add up
        """Bytes of the states and snapshots, and of the last step's inputs; what forks share counts in each."""
        if not self._states:
            return 0
        last = self._last or _LastStep(0, {}, {}, ())
        held = [self._states, last.states, *self._snapshots.values()]
        different = {id(part): part.nbytes for states in held for state in states.values() for part in state}
        return sum(different.values()) + sum(step.nbytes for step in last.steps.values())

    def of(self, key: Key) -> State | None:
        """A committed state; None before the first token."""
        return self._states.get(key)

    @property
    def shape(self) -> RecurrentShape:
        """The shapes of all committed states."""
        return replace(self._of, states=tuple((key, PartShape.of(self._states[key])) for key in sorted(self._states)))

    @property
    def kept_bytes(self) -> int:  # type: ignore[override]
        """Bytes that the last forward keeps until a path is committed."""
        return sum(step.nbytes for step in self._steps.values())

    def put(self, key: Key, step: LayerStep) -> None:
        """Hand in one layer's step of the forward that runs."""
        self._steps[key] = step

    def keep(self, length: int, rows: Sequence[int]) -> None:
        """Commit these rows of the last forward, before which `length` tokens were committed."""
        if not self._steps:
            return
        states = _after(self._states, self._steps, rows)
        divisible = all(step.divisible for step in self._steps.values())
        self._last = _LastStep(length, self._states, self._steps, tuple(rows)) if divisible else None
        self._states, self._steps = states, {}

    def mark(self, length: int) -> None:
        """Take a snapshot at the current `length`; drops the one that is nearest to its neighbours beyond the bound."""
        if not self._states or length in self._snapshots:
            return
        self._snapshots[length] = self._states
        if len(self._snapshots) > MOST_SNAPSHOTS:
            lengths = sorted(self._snapshots)
            around = zip([0, *lengths], lengths, lengths[1:], strict=False)
            del self._snapshots[min((after - before, at) for before, at, after in around)[1]]

    def nearest(self, length: int, wanted: int) -> int:
        """The most tokens up to `wanted`, of the current `length`, that the states can go back to."""
        if not self._states or wanted == length:
            return wanted
        if self._last is not None and self._last.length <= wanted:
            return wanted
        return max((at for at in self._snapshots if at <= wanted), default=0)

    def rewind(self, length: int, to: int) -> None:
        """Go back from `length` tokens to `to`, which `nearest` returned; forgets what was not committed."""
        self._steps = {}
        if to != length:
            self._states = self._at(to, length)
            self._last = None
            self._snapshots = {at: states for at, states in self._snapshots.items() if at <= to}

    def fork(self, length: int, at: int) -> RecurrentStates:
        """The states of another sequence that begins with the first `at` of these `length` tokens."""
        states = self._at(at, length)
        return RecurrentStates(self._of, states, {mark: held for mark, held in self._snapshots.items() if mark <= at})

    def first_layers(self, count: int) -> RecurrentStates:
        """The states of the first `count` layers, to run ahead with."""
        return RecurrentStates(self._of, {key: state for key, state in self._states.items() if key[0] < count})

    def parts(self, length: int, at: int) -> list[Tensor]:
        """All tensors of the states after the first `at` tokens, in the order of their keys."""
        states = self._at(at, length)
        return [part for key in sorted(states) for part in states[key]]

    def _at(self, wanted: int, length: int) -> States:
        """The states after `wanted` of the current `length` tokens."""
        last = self._last
        if wanted == length:
            return self._states
        if last is not None and last.length <= wanted:
            rows = last.rows[: wanted - last.length]
            return _after(last.states, last.steps, rows) if rows else last.states
        return self._snapshots[wanted] if wanted and self._states else {}


def states_of(kv: KVCache) -> RecurrentStates:
    """The recurrent states of a sequence."""
    assert isinstance(kv.state, RecurrentStates), "the KV cache is that of a model with recurrent layers"
    return kv.state


def _after(states: States, steps: dict[Key, LayerStep], rows: Sequence[int]) -> States:
    path = Path(rows)
    return {key: step.state_after(states.get(key), path) for key, step in steps.items()}
