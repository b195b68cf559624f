"""What the decoder keeps of a request: keys and values of its own tokens, and fixed ones of the encoder's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from precedent.target.kv.arena import KVArena
from precedent.target.kv.cache import KVCache
from precedent.target.kv.shape import KVShape

CrossKV = tuple[tuple[Tensor, Tensor], ...]
"""Each decoder layer's keys and values `[1, heads, prompt_tokens, dim]` of the encoder's output."""


class DecoderKV(KVCache):
    """A decoder's KV cache; `cross` is set once the encoder has run, and never changes after that."""

    def __init__(self, shape: KVShape, arena: KVArena | None = None) -> None:
        super().__init__(shape, arena)
        self.cross: CrossKV = ()

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers, those of the encoder's output included."""
        return super().nbytes + sum(part.nbytes for pair in self.cross for part in pair)

    def _unfilled(self) -> DecoderKV:
        other = DecoderKV(self._shape, self._arena)
        other.cross = self.cross
        return other


class CrossRecorder(Cache):
    """Stores what each decoder layer makes of the encoder's output, in the forward that does so for the first time."""

    def __init__(self) -> None:
        self._recorded: dict[int, tuple[Tensor, Tensor]] = {}
        super().__init__(layers=[])

    @property
    def recorded(self) -> CrossKV:
        """What was stored, layer by layer. Raises ValueError if a layer, or all of them, stored nothing."""
        if not self._recorded or sorted(self._recorded) != list(range(len(self._recorded))):
            raise ValueError("not every decoder layer attends to the encoder's output")
        return tuple(self._recorded[layer] for layer in range(len(self._recorded)))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values."""
        self._recorded[layer_idx] = stored = key_states.contiguous(), value_states.contiguous()
        return stored


class CrossMarkers(Cache):
    """Stands for the encoder's output of several requests: each layer's keys only tell which layer it is."""

    def __init__(self, num_layers: int, like: Tensor) -> None:
        markers = [_Marker(like.new_empty((1, 1, 1, 1))) for _ in range(num_layers)]
        self._layer_of = {id(layer.keys): index for index, layer in enumerate(markers)}
        super().__init__(layers=list(markers))

    def layer_of(self, key: Tensor) -> int | None:
        """The layer whose marker this is; None for other keys."""
        return self._layer_of.get(id(key))


class _Marker(CacheLayerMixin):
    is_sliding = False
    is_croppable = False

    def __init__(self, marker: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not type it
        self.keys = self.values = marker

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("the encoder's keys and values are fixed")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def bytes_per_prompt_token(cross: CrossKV) -> int:
    """Bytes that all layers keep of one token of the encoder's output."""
    return sum(part.nbytes // part.shape[2] for pair in cross for part in pair)


def on_device(token_ids: Sequence[int], device: torch.device) -> Tensor:
    """Token ids of one sequence, `[1, tokens]`."""
    return torch.tensor([list(token_ids)], dtype=torch.long, device=device)
