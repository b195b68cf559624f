"""A forward over the decoder rows of several requests, each with its own encoder output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from precedent.runtime.placing import placed
from precedent.target.kv.rows import Forward, Rows, running_forward
from precedent_models.encoder_decoder.kv import CrossKV, CrossMarkers, CrossRecorder, DecoderKV, on_device


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
