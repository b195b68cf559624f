"""Outputs of chosen layers of committed tokens, kept for drafters that read what the target saw on its way.

They are one more layer of the KV cache, as the hidden states of `hidden_states` are, with the layers side by side:
keys `[1, tokens, num_chosen * hidden_size]` and no values. A target that nobody asks for them keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ConfigError, UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Forward
from precedent.target.kv.shape import KVShape, LayerShape


class LayerOutputs:
    """Stores what comes out of the layers `numbers` (counted from 1) of each row in layer `index` of its KV cache."""

    def __init__(self, layers: Sequence[nn.Module], numbers: tuple[int, ...], index: int) -> None:
        self.numbers, self.index = numbers, index
        self._layers = {number: layers[number - 1] for number in numbers}
        self._seen: dict[int, Tensor] = {}

    @contextmanager
    def kept_from(self, forward: Forward) -> Iterator[None]:
        """Watch a forward, and write its rows behind the committed ones. They are not committed yet."""
        token = _WATCHING.set(self)
        try:
            yield
            found = [self._seen[number].flatten(0, -2) for number in self.numbers]
        finally:
            _WATCHING.reset(token)
            self._seen = {}
        states = torch.cat(found, dim=-1)[None, None]
        for rows, (start, stop) in zip(forward.sequences, forward.spans, strict=True):
            part = states[:, :, start:stop]
            rows.kv.layer(self.index).write(part, part[..., :0])

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Let the chosen layers report what they return, for a forward of the model's own.

        Hooks stay no longer than that: layers with hooks do not run together (`all_layers`).
        """
        with ExitStack() as hooks:
            for number, layer in self._layers.items():
                hooks.callback(layer.register_forward_hook(self._reporting(number)).remove)
            yield

    def see(self, number: int, output: Tensor) -> None:
        """Take what comes out of layer `number`, `[1, rows, hidden_size]`; it may change afterwards."""
        if number in self._layers:
            self._seen[number] = output.detach().clone()

    def of(self, kv: KVCache, first: int, end: int) -> Tensor:
        """The outputs for these tokens of a sequence, `[end - first, num_chosen * hidden_size]`, without a copy."""
        return kv.layer(self.index).rows(first, end)[0][0, 0]

    def _reporting(self, number: int) -> Any:
        def report(layer: nn.Module, inputs: Any, output: Any) -> None:
            if _WATCHING.get() is self:  # other targets, and early exits, may share the layer
                self.see(number, output if isinstance(output, Tensor) else output[0])

        return report


_WATCHING: ContextVar[LayerOutputs | None] = ContextVar("layer outputs", default=None)


def watching() -> LayerOutputs | None:
    """What takes the outputs of layers in the forward that this thread is running; None if nothing does."""
    return _WATCHING.get()


def outputs_kept_by(model: PreTrainedModel, shape: KVShape, numbers: Sequence[int]) -> tuple[LayerOutputs, KVShape]:
    """What keeps the outputs of a model's layers, and the shape of KV caches that hold them.

    Raises UnsupportedError, naming the model, where they cannot be read, and ConfigError for layers that it lacks.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(f"{type(model).__name__} has no `layers`, whose outputs are read")
    wrong = [number for number in numbers if not 1 <= number <= len(layers)]
    if wrong or not numbers:
        raise ConfigError(
            f"{type(model).__name__} has the layers 1 to {len(layers)}, and {list(numbers)} were asked for"
        )
    size = model.config.get_text_config().hidden_size
    layer = LayerShape(1, len(numbers) * size, 1, 0, model.dtype, next(layers[-1].parameters()).device)
    kept = LayerOutputs(list(layers), tuple(numbers), len(shape.layers))
    return kept, replace(shape, layers=(*shape.layers, layer))
