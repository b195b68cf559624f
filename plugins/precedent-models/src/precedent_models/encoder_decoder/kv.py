"""What the decoder keeps of a request, and a forward over the decoder rows of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from precedent.runtime.placing import placed
from precedent.target.kv.arena import KVArena
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Forward, Rows, running_forward
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


class DecoderForward(Forward):
    """The sequences in one forward of the decoder.

    `like` `[1, 1, hidden]` stands for the encoder's output, whose keys and values each sequence has in its KV cache.
    A model that takes positions as an argument gets those of the tree (`gives_positions`).
    """

    def __init__(
        self, sequences: Sequence[Rows], like: Tensor, num_layers: int, *, gives_positions: bool = False
    ) -> None:
        super().__init__(sequences)
        self._states, self._markers = like, CrossMarkers(num_layers, like)
        self._gives_positions = gives_positions

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the whole model's forward, which then leaves its encoder out."""
        inputs = super().inputs(device)
        self.positions: Tensor = inputs["position_ids"][0]
        positions = {"decoder_position_ids": inputs["position_ids"]} if self._gives_positions else {}
        return positions | {
            "encoder_outputs": BaseModelOutput(last_hidden_state=self._states),
            "decoder_input_ids": inputs["input_ids"],
            "past_key_values": _caches(self.cache, self._markers),
            "use_cache": True,
        }

    def cross_layer(self, key: Tensor) -> int | None:
        """The layer whose attention to the encoder's output these keys stand for; None in self-attention."""
        return self._markers.layer_of(key)

    def cross_kv(self, index: int, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values `[1, heads, prompt_tokens, dim]` of sequence `index`'s prompt."""
        kv = self.sequences[index].kv
        assert isinstance(kv, DecoderKV), "the decoder runs on caches that hold the encoder's output"
        return kv.cross[layer]

    @cached_property
    def distances(self) -> list[Tensor]:
        """How many tokens each key stands before (negative) or behind each row, `[rows, keys]` for each sequence.

        Keys are counted along the tree: a row's parent is at -1, wherever its row lies.
        """
        return [placed(_distances(rows), self.positions.device) for rows in self.sequences]


def decoder_forward() -> DecoderForward | None:
    """The decoder forward that this thread is running; None outside of one."""
    running = running_forward()
    return running if isinstance(running, DecoderForward) else None


def recorded_cross(model: Any, states: Tensor, token_ids: Sequence[int], own: Cache | None = None) -> CrossKV:
    """Each layer's keys and values of the encoder's output `[1, prompt_tokens, hidden]`; one token is enough.

    `own` sees what the decoder stores of its tokens.
    """
    recorder = CrossRecorder()
    model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        decoder_input_ids=on_device(token_ids, states.device),
        past_key_values=EncoderDecoderCache(CrossRecorder() if own is None else own, recorder),
        use_cache=True,
    )
    return recorder.recorded


def _caches(own: Any, cross: CrossMarkers) -> EncoderDecoderCache:
    """Transformers' pair of caches; it must not compute the encoder's keys and values again."""
    pair = EncoderDecoderCache(own, cross)
    pair.is_updated = dict.fromkeys(range(len(cross.layers)), True)
    return pair


def _distances(rows: Rows) -> np.ndarray[Any, np.dtype[np.int64]]:
    keys = np.concatenate([np.arange(rows.kv.length), rows.positions])
    return keys[None, :] - rows.positions[:, None]
