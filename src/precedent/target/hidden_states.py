"""Hidden states of committed tokens, kept for drafters that read them: the output of a model's last layer.

They are one more layer of the KV cache, with keys `[1, tokens, hidden_size]` and no values. So they follow what is
kept, rewound, forked, written to disk and counted, and a target that nobody asks for them keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Forward
from precedent.target.kv.shape import KVShape, LayerShape


class HiddenStates:
    """Stores the last layer's output of each row in layer `index` of its KV cache, before or after the final norm."""

    def __init__(self, norm: nn.Module, index: int, *, after_norm: bool) -> None:
        self.index, self.after_norm = index, after_norm
        self._last: Tensor | None = None
        norm.register_forward_hook(self._see)

    @contextmanager
    def kept_from(self, forward: Forward) -> Iterator[None]:
        """Watch a forward, and write its rows behind the committed ones. They are not committed yet."""
        token = _WATCHING.set(self)
        try:
            yield
        finally:
            _WATCHING.reset(token)
            states, self._last = self._last, None
        assert states is not None, "the final norm was not called in a forward of this model"
        states = states.reshape(1, 1, -1, states.shape[-1])
        for rows, (start, stop) in zip(forward.sequences, forward.spans, strict=True):
            part = states[:, :, start:stop]
            rows.kv.layer(self.index).write(part, part[..., :0])

    def of(self, kv: KVCache, first: int, end: int) -> Tensor:
        """The hidden states of these tokens of a sequence, `[end - first, hidden_size]`, without a copy."""
        return kv.layer(self.index).rows(first, end)[0][0, 0]

    def _see(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if _WATCHING.get() is self:  # other targets, and early exits, may share the norm
            self._last = output if self.after_norm else inputs[0]


_WATCHING: ContextVar[HiddenStates | None] = ContextVar("hidden states", default=None)


def kept_by(model: PreTrainedModel, shape: KVShape, *, after_norm: bool) -> tuple[HiddenStates, KVShape]:
    """What keeps the hidden states of a model, and the shape of KV caches that hold them.

    Raises UnsupportedError, naming the model, where they cannot be read.
    """
    base: Any = model.base_model
    norm = getattr(base, "norm", None)
    if norm is None:
        raise UnsupportedError(f"{type(model).__name__} has no final `norm`, where hidden states are read")
    layer = LayerShape(1, norm.weight.shape[-1], 1, 0, model.dtype, norm.weight.device)
    kept = HiddenStates(norm, len(shape.layers), after_norm=after_norm)
    return kept, replace(shape, layers=(*shape.layers, layer))
