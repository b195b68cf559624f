"""The loss over what the assistant wrote, behind a head of the prompt whose keys and values are kept for a while."""

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
    """Keys and values of the prompt's head, the same for all conversations: computed anew every `lifetime` uses.

    No gradient flows into them. The head is twice as long as a conversation, so this saves most of the work; what a few
    steps change in its keys and values is little, and every evaluation computes them with the final weights.
    """

    def __init__(self, token_ids: Sequence[int], lifetime: int) -> None:
        self._token_ids, self._lifetime, self._uses = torch.tensor([list(token_ids)]), lifetime, 0
        self._layers: KeysAndValues = []

    def cache(self, decoder: Any, rows: int) -> DynamicCache:
        """A KV cache that holds the head once for each of `rows` conversations."""
        if self._uses % self._lifetime == 0:
            with torch.no_grad():
                found = decoder(input_ids=self._token_ids, use_cache=True).past_key_values
            self._layers = [(layer.keys, layer.values) for layer in found.layers]
        self._uses += 1
        return DynamicCache([(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in self._layers])


def written_logits(model: PreTrainedModel, head: Head, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits `[written, vocabulary]` for the tokens of the assistant, and the ids `[written]` of these tokens.

    The output layer sees only the positions that the loss looks at: over a large vocabulary it costs a third.
    """
    decoder: Any = model.get_decoder()
    cache = head.cache(decoder, len(batch.token_ids))
    hidden = decoder(input_ids=batch.token_ids, past_key_values=cache, use_cache=True).last_hidden_state
    predicts = batch.written[:, 1:]
    logits: Tensor = model.get_output_embeddings()(hidden[:, :-1][predicts])
    return logits, batch.token_ids[:, 1:][predicts]


def loss_of(model: PreTrainedModel, head: Head, batch: Batch) -> tuple[Tensor, float]:
    """Mean negative log-likelihood of the written tokens in nats, and the share of them that greedy decoding hits."""
    logits, wanted = written_logits(model, head, batch)
    hits = (logits.detach().argmax(-1) == wanted).float().mean().item()
    return cross_entropy(logits.float(), wanted), hits
