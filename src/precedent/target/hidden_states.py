"""Hidden states of committed tokens, kept for drafters and judges: final ones, or the outputs of chosen layers.

They are one more layer of the KV cache, with keys `[1, tokens, width]` and no values. So they are committed, rewound,
forked, written to disk and counted with the rest, and a target that nobody asks for them keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precedent.errors import ConfigError, UnsupportedError
from precedent.target.kv.shape import LayerShape

if TYPE_CHECKING:
    from precedent.target.kv.cache import KVCache
    from precedent.target.kv.rows import ForwardPass
    from precedent.target.model import TargetModel

FINAL = 0
"""Stands for the last layer's output among the numbers of layers."""


class HiddenStates:
    """Writes the states of each row to layer `index` of its KV cache.

    They are the outputs of `layers` side by side, by their numbers, counted from 1; or without any the last layer's
    output, read after the final `norm`, or before it.
    """

    def __init__(
        self, index: int, layers: Mapping[int, nn.Module], norm: nn.Module | None = None, *, after_norm: bool = True
    ) -> None:
        self.numbers, self.index = tuple(layers), index
        self._layers, self._seen = layers, dict[int, Tensor]()

        def see_norm(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self in _WATCHING.get():
                self._seen[FINAL] = output if after_norm else inputs[0]

        if norm is not None:
            norm.register_forward_hook(see_norm)

    @contextmanager
    def kept_from(self, forward: ForwardPass) -> Iterator[None]:
        """Watch a forward and write its rows behind the committed ones; they are not committed yet."""
        token = _WATCHING.set((*_WATCHING.get(), self))
        try:
            yield
            found = [self._seen[number].flatten(0, -2) for number in self.numbers or (FINAL,)]
        finally:
            _WATCHING.reset(token)
            self._seen = {}
        states = torch.cat(found, dim=-1)[None, None]
        for rows, (start, stop) in zip(forward.sequences, forward.spans, strict=True):
            part = states[:, :, start:stop]
            rows.kv.layer(self.index).write(part, part[..., :0])

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Let the chosen layers report their outputs during a forward of the model's own.

        Hooks stay no longer than that: layers with hooks do not run together (`all_layers`).
        """

        def report(number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
            if self in _WATCHING.get():  # other targets, and early exits, may share the layer
                self.see(number, output if isinstance(output, Tensor) else output[0])

        with ExitStack() as hooks:
            for number, layer in self._layers.items():
                hooks.callback(layer.register_forward_hook(partial(report, number)).remove)
            yield

    def see(self, number: int, output: Tensor) -> None:
        """Take the output of layer `number`, `[1, rows, hidden_size]`, which may change afterwards."""
        if number in self._layers:
            self._seen[number] = output.detach().clone()

    def of(self, kv: KVCache, first: int, end: int) -> Tensor:
        """The states of these tokens of a sequence, `[end - first, width]`, without a copy."""
        return kv.layer(self.index).rows(first, end)[0][0, 0]


_WATCHING: ContextVar[tuple[HiddenStates, ...]] = ContextVar("hidden states", default=())


def watching() -> HiddenStates | None:
    """The one that takes the outputs of layers in the forward that this thread is running; None if nothing does."""
    return next((kept for kept in _WATCHING.get() if kept.numbers), None)


def final_states_of(target: TargetModel, *, after_norm: bool) -> HiddenStates:
    """Keep the last layer's outputs from now on. Raises UnsupportedError, naming the model, without a final norm."""
    norm: Any = getattr(target.model.base_model, "norm", None)
    if norm is None:
        raise UnsupportedError(f"{type(target.model).__name__} has no final `norm`, where hidden states are read")
    index = _added_layer(target, norm.weight.shape[-1], norm.weight.device)
    return HiddenStates(index, {}, norm, after_norm=after_norm)


def layer_outputs_of(target: TargetModel, numbers: Sequence[int]) -> HiddenStates:
    """Keep the outputs of these layers, counted from 1, from now on.

    Raises UnsupportedError, naming the model, where they cannot be read, and ConfigError for layers that it lacks.
    """
    name, layers = type(target.model).__name__, getattr(target.model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(f"{name} has no `layers`, whose outputs are read")
    if not numbers or not all(1 <= number <= len(layers) for number in numbers):
        raise ConfigError(f"{name} has the layers 1 to {len(layers)}, and {list(numbers)} were asked for")
    width = len(numbers) * target.model.config.get_text_config().hidden_size
    index = _added_layer(target, width, next(layers[-1].parameters()).device)
    return HiddenStates(index, {number: layers[number - 1] for number in numbers})


def _added_layer(target: TargetModel, width: int, device: torch.device) -> int:
    """Add a layer of this width to the target's KV caches; returns its index."""
    shape, layer = target.kv_shape, LayerShape(1, width, 1, 0, target.model.dtype, device)
    target.kv_shape = replace(shape, layers=(*shape.layers, layer))
    return len(shape.layers)
