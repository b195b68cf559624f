"""Lets transformers' recurrent modules compute the rows of a step: their own forward, with our functions in it.

A module keeps its projections, gates and norms. Only the convolution and the recurrence inside it are replaced: its
forward is bound anew with `functions` in place of transformers' functions of the same names. Nothing outside the model
changes, and outside of our forwards the module computes as it always did.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from precedent.runtime.patched_modules import is_swapped, rebound, swapped_class
from precedent_models.recurrent.functions import FUNCTIONS, OWN_FORWARDS
from precedent_models.recurrent.states import LayerStep, Path, State, states_of
from precedent_models.recurrent.step import running_step, the_step

TAKES_WINDOW, TAKES_STATE = "update_conv_state", "update_recurrent_state"
"""The calls by which a module hands its state to transformers' cache."""

OWN_CACHES = ("MiniMaxCache",)
"""Cache classes that some models insist on; ours takes their place."""

PLACE = "recurrent_place"
"""The attribute of an adapted module that tells its layer, and its index among the layer's modules."""


def adapt(model: PreTrainedModel) -> list[str]:
    """Adapt all recurrent modules of a model; returns the class names of those that only follow chains."""
    places: dict[int, int] = {}
    chains = set[str]()
    for name, module in model.named_modules():
        forward = _forward_for(module)
        if forward is None:
            continue
        layer = int(next(iter(re.findall(r"\.(\d+)\.", f".{name}.")), 0))
        places[layer] = places.get(layer, -1) + 1
        setattr(module, PLACE, (layer, places[layer]))
        if forward is run_chain:
            chains.add(_original(module).__name__)
        if not is_swapped(module):
            original: Any = type(module)
            module.__class__ = _adapted(original, forward)
    return sorted(chains)


def _original(module: nn.Module) -> Any:
    original: type[nn.Module] = getattr(type(module), "swapped_from", type(module))
    return original


def _forward_for(module: nn.Module) -> Callable[..., Any] | None:
    """What a module computes in our steps; None for a module that is not recurrent."""
    original = _original(module)
    if original.__name__ in OWN_FORWARDS:
        return OWN_FORWARDS[original.__name__]
    names = _names(original)
    if names & set(OWN_CACHES):
        return _rebound(original, own_cache=True)
    if not names & {TAKES_WINDOW, TAKES_STATE}:
        return None
    windows = TAKES_WINDOW not in names or "causal_conv1d_fn" in names
    scans = TAKES_STATE not in names or bool(names & (FUNCTIONS.keys() - {"causal_conv1d_fn"}))
    return _rebound(original, own_cache=False) if windows and scans else run_chain


@cache
def _names(original: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


@cache
def _rebound(original: Any, own_cache: bool) -> Callable[..., Any]:
    return rebound(original.forward, dict.fromkeys(OWN_CACHES, Cache) if own_cache else FUNCTIONS)


@cache
def _adapted(original: Any, ours: Callable[..., Any]) -> type[nn.Module]:
    def forward(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return original.forward(module, *args, **kwargs)
        step.inside(getattr(module, PLACE))
        return ours(module, *args, **kwargs)

    return swapped_class(original, forward)


def run_chain(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward over a chain of one sequence. Raises UnsupportedError for trees and batches."""
    step = the_step()
    rows, key = step.alone(module), step.next_key()
    states, replay = states_of(rows.kv), _Replay(module, args, kwargs, rows.kv, len(rows))
    output, replay.state = replay.over(states.of(key), len(rows))
    states.put(key, replay)
    return output


class _Replay(LayerStep):
    """What is kept of a step: a call of the module, which can be repeated for its first rows, and the last state."""

    state: State = ()

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kv: Cache, count: int) -> None:
        super().__init__(*(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)))
        self._module, self._args, self._kwargs, self._kv, self._count = module, args, kwargs, kv, count

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the module's inputs."""
        return super().nbytes + sum(part.nbytes for part in self.state)

    @torch.inference_mode()
    def state_after(self, state: State | None, path: Path) -> State:
        """The state after the first rows of the chain."""
        count = len(path.rows)
        return self.state if count == self._count else self.over(state, count)[1]

    def over(self, state: State | None, count: int) -> tuple[Any, State]:
        """The output and the state after the first `count` rows, from a copy of the state before them."""
        memory = _Memory(self._kv, state)
        args, kwargs = self._first((self._args, dict(self._kwargs)), count, memory)
        return type(self._module).swapped_from.forward(self._module, *args, **kwargs), memory.state()

    def _first(self, value: Any, count: int, memory: _Memory) -> Any:
        """An argument for the first rows, with `memory` in place of our cache."""
        if isinstance(value, Cache):
            return memory
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == self._count:
            return value[:, :count]
        if isinstance(value, tuple | list):
            return type(value)(self._first(each, count, memory) for each in value)
        if isinstance(value, dict):
            return {name: self._first(each, count, memory) for name, each in value.items()}
        return value


class _Memory(Cache):
    """transformers' cache for one recurrent module, filled from a state; keys and values go to ours."""

    def __init__(self, kv: Cache, state: State | None) -> None:
        super().__init__(layers=[])
        layer: Any = LinearAttentionLayer()
        self._kv, self._layer = kv, layer
        if state is None:
            return
        window, matrix = (part.clone() if part.numel() else None for part in state)
        layer.conv_states[0], layer.recurrent_states[0] = window, matrix
        layer.is_conv_states_initialized[0] = window is not None
        layer.is_recurrent_states_initialized[0] = matrix is not None
        layer.has_previous_state[0] = True
        if window is not None:
            layer.conv_kernel_size[0] = window.shape[-1]

    def state(self) -> State:
        """The state now, without what the module does not use."""
        found = self._layer.conv_states[0], self._layer.recurrent_states[0]
        return tuple(torch.empty(0) if part is None else part for part in found)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer.conv_states[0] if self._layer.has_previous_state[0] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer.recurrent_states[0] if self._layer.has_previous_state[0] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        return self._layer.update_conv_state(conv_states, 0, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        return self._layer.update_recurrent_state(recurrent_states, 0)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._layer.has_previous_state[0])

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._kv.update(key_states, value_states, layer_idx, *args, **kwargs)
