"""The loss on the assistant's tokens, with cached keys and values for the head of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from precedent_demo.training.batches import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KeysAndValues = list[tuple[Tensor, Tensor]]


class Head:
    """Keys and values of the prompt's head, the same for all conversations; recomputed every `lifetime` uses.

    No gradient flows into them. The head is twice as long as a conversation, so this saves most of the work. A few
    steps change its keys and values only a little, and every evaluation recomputes them with the current weights.
    """

    def __init__(self, token_ids: Sequence[int], lifetime: int) -> None:
        self._token_ids, self._lifetime, self._uses = torch.tensor([list(token_ids)]), lifetime, 0
        self._layers: KeysAndValues = []

    def cache(self, decoder: Any, rows: int) -> DynamicCache:
        """A KV cache with the head repeated for each of `rows` conversations."""
        if self._uses % self._lifetime == 0:
            with torch.no_grad():
                found = decoder(input_ids=self._token_ids, use_cache=True).past_key_values
            self._layers = [(layer.keys, layer.values) for layer in found.layers]
        self._uses += 1
        return DynamicCache([(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in self._layers])


def written_logits(model: PreTrainedModel, head: Head, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits `[written, vocabulary]` for the assistant's tokens, and the ids `[written]` of these tokens.

    The output layer runs only on the positions that count for the loss: with a large vocabulary it costs a third.
    """
    decoder: Any = model.get_decoder()
    cache = head.cache(decoder, len(batch.token_ids))
    hidden = decoder(input_ids=batch.token_ids, past_key_values=cache, use_cache=True).last_hidden_state
    predicts = batch.written[:, 1:]
    logits: Tensor = model.get_output_embeddings()(hidden[:, :-1][predicts])
    return logits, batch.token_ids[:, 1:][predicts]


def loss_of(model: PreTrainedModel, head: Head, batch: Batch) -> tuple[Tensor, float]:
    """Mean negative log-likelihood of the assistant's tokens in nats, and the share that greedy decoding predicts."""
    logits, wanted = written_logits(model, head, batch)
    hits = (logits.detach().argmax(-1) == wanted).float().mean().item()
    return cross_entropy(logits.float(), wanted), hits
