"""What the decoder keeps of a request, and a forward over the decoder rows of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from precedent.runtime.placing import placed
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import ForwardPass, Rows, running_forward

CrossKV = tuple[tuple[Tensor, Tensor], ...]
"""Each decoder layer's keys and values `[1, heads, prompt_tokens, dim]` of the encoder's output."""


class DecoderKV(KVCache):
    """A decoder's KV cache; `cross` is set once the encoder has run, and never changes after that."""

    cross: CrossKV = ()

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers, those of the encoder's output included."""
        return super().nbytes + sum(part.nbytes for pair in self.cross for part in pair)

    def fork(self, length: int, room: int = 0) -> DecoderKV:
        """A separate cache with a copy of the first `length` rows, for the same prompt."""
        fork = super().fork(length, room)
        assert isinstance(fork, DecoderKV)
        fork.cross = self.cross
        return fork


def on_device(token_ids: Sequence[int], device: torch.device) -> Tensor:
    """Token ids of one sequence, `[1, tokens]`."""
    return torch.tensor([list(token_ids)], dtype=torch.long, device=device)


class DecoderForward(ForwardPass):
    """The sequences in one forward of the decoder.

    `like` `[1, 1, hidden]` stands for the encoder's output, whose keys and values each sequence has in its KV cache.
    A model that takes positions as an argument gets those of the tree (`gives_positions`).
    """

    def __init__(
        self, sequences: Sequence[Rows], like: Tensor, num_layers: int, *, gives_positions: bool = False
    ) -> None:
        super().__init__(sequences)
        self._states, self._gives_positions = like, gives_positions
        layers: list[Any] = [DynamicLayer() for _ in range(num_layers)]
        for layer in layers:  # its keys only tell which layer it is
            layer.keys = layer.values = like.new_empty((1, 1, 1, 1))
            layer.is_initialized = True
        self._layer_of = {id(layer.keys): index for index, layer in enumerate(layers)}
        self._cross = Cache(layers=layers)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the whole model's forward, which then leaves its encoder out."""
        inputs = super().inputs(device)
        self.positions: Tensor = inputs["position_ids"][0]
        positions = {"decoder_position_ids": inputs["position_ids"]} if self._gives_positions else {}
        return positions | {
            "encoder_outputs": BaseModelOutput(last_hidden_state=self._states),
            "decoder_input_ids": inputs["input_ids"],
            "past_key_values": self._caches(),
            "use_cache": True,
        }

    def cross_layer(self, key: Tensor) -> int | None:
        """The layer whose attention to the encoder's output these keys stand for; None in self-attention."""
        return self._layer_of.get(id(key))

    def _caches(self) -> EncoderDecoderCache:
        """Transformers' pair of caches; it must not compute the encoder's keys and values again."""
        pair = EncoderDecoderCache(self.cache, self._cross)
        pair.is_updated = dict.fromkeys(range(len(self._cross.layers)), True)
        return pair

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

    Raises ValueError if a layer, or all of them, stored none. `own` sees what the decoder stores of its tokens.
    """
    cross = DynamicCache()
    model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        decoder_input_ids=on_device(token_ids, states.device),
        past_key_values=EncoderDecoderCache(DynamicCache() if own is None else own, cross),
        use_cache=True,
    )
    layers: list[Any] = cross.layers
    if not layers or not all(layer.is_initialized for layer in layers):
        raise ValueError("not every decoder layer attends to the encoder's output")
    return tuple((layer.keys, layer.values) for layer in layers)


def _distances(rows: Rows) -> np.ndarray[Any, np.dtype[np.int64]]:
    keys = np.concatenate([np.arange(rows.kv.length), rows.positions])
    return keys[None, :] - rows.positions[:, None]
