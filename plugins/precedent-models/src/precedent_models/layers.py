"""How models with recurrent layers, or with indexers, run in the torch target; some have both.

An indexer chooses the tokens that a layer attends to (DeepSeek Sparse Attention): every new row scores all keys of its
sequence and attends to the `k` that score best among those it may see. The keys are a second cache beside the layer's
own. transformers computes the scores; hidden keys score minus infinity.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from precedent.target.kv.cache import KVLayer
from precedent.target.kv.layer_kinds import (
    BLOCK_SPARSE,
    FULL_ATTENTION,
    HYBRID,
    INDEXED,
    INDEXED_ATTENTION,
    RECURRENT,
)
from precedent.target.kv.rows import ForwardPass
from precedent.target.kv.shape import LayerShape, ObserverLayer
from precedent.target.support import LayerState
from precedent_models.recurrent.adapters import adapt
from precedent_models.recurrent.states import RecurrentShape
from precedent_models.recurrent.step import RecurrentStep

HIDDEN = -3e4
"""A score below this one belongs to a key that a mask hides: masks add minus infinity or a dtype's smallest number."""


class Best(NamedTuple):
    """What `Tensor.topk` returns."""

    values: Tensor
    indices: Tensor


class IndexKeys(Tensor):
    """An indexer's keys `[1, keys, dim]`; scores computed from them choose keys as plain decoding does.

    Scores are sums of rectified products, so several may be exactly 0. Which of equal scores torch chooses depends on
    how many scores there are, hidden ones included. Rows where that matters choose again, among the keys they see.
    """

    def topk(self, k: Any, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        """The `k` best scores along the last dimension; no subclass any more."""
        scores = self.as_subclass(Tensor)
        best: Any = scores.topk(k, dim, *args, **kwargs)
        if scores.dim() != 3:
            return best
        return Best(best.values, _settled(scores, best.values, best.indices))


def _settled(scores: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """The indices chosen, anew in rows where equal scores compete for the last place, `[batch, rows, k]`."""
    last = values[..., -1:]
    competing = (scores == last).sum(-1) > (values == last).sum(-1)
    for batch, row in (competing & (last[..., 0] > HIDDEN)).nonzero().tolist():
        own = scores[batch, row]
        seen = (own > HIDDEN).nonzero()[:, 0]
        indices[batch, row] = seen[own[seen].topk(indices.shape[-1]).indices]
    return indices


class HybridLayers(LayerState):
    """Runs layers of these kinds."""

    def __init__(self, kinds: set[str], config: Any) -> None:
        self.kinds, self.state = kinds, RecurrentShape(cache_layer=_CacheLayer)
        self.stateful = not kinds.isdisjoint(RECURRENT)
        self.observer_layer = _ObserverLayer
        indexed = sorted(kinds & INDEXED)
        # most hybrids go through transformers' attention interface without declaring it; a layer with an indexer turns
        # what it chose into a mask only for attention that it knows
        self.packs = not indexed
        self.why_irregular = "the sums of its recurrent layers depend on the tree around a row"
        if indexed:
            self.why_irregular = f"the indexers of its {', '.join(indexed)} layers choose other keys at every step"
        self._by_place = BLOCK_SPARSE in (getattr(config, "layer_types", None) or ())

    def adapt(self, model: PreTrainedModel) -> str | None:
        """Let recurrent modules follow trees; some follow only chains, and block-sparse attention does too."""
        followers = adapt(model)
        if followers:
            return f"{', '.join(followers)} has a state that follows one path of tokens"
        return "chooses blocks of keys by their place in the KV cache" if self._by_place else None

    def running(self, forward: ForwardPass) -> AbstractContextManager[object]:
        """Announce a forward to recurrent modules."""
        return RecurrentStep(forward).running() if self.stateful else nullcontext()

    def masks(self, kinds: set[str]) -> dict[str, str | None]:
        """Attention beside a state takes the mask of full attention, and so does attention to what was chosen."""
        attending = {FULL_ATTENTION if kind in HYBRID else kind for kind in kinds} - RECURRENT
        masks: dict[str, str | None] = {
            kind: FULL_ATTENTION if kind == INDEXED_ATTENTION else kind for kind in attending
        }
        return {**dict.fromkeys(RECURRENT), **masks} if masks and self.stateful else masks


class _NoState(LinearAttentionCacheLayerMixin):
    """What our caches answer when transformers' recurrent modules ask for a state: none, the running step has it.

    A module that is told so computes all its rows at once, with functions that ours replace.
    """

    is_croppable = True
    record_past = False

    has_previous_state: ClassVar[dict[int, bool]] = defaultdict(bool, {0: False})  # type: ignore[misc]  # an attribute of objects there
    """No state has been stored, whichever one is asked for."""

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The new inputs alone; the window before them is added where they are convolved."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing is stored."""
        return recurrent_states


class _CacheLayer(KVLayer, _NoState):  # type: ignore[misc]  # `lazy_initialization` does nothing in either
    """A layer of a `KVCache`; `extra` holds the keys of its indexer, as keys of one head with no values."""

    def update_indexer(self, indexer_key_states: Tensor) -> IndexKeys:
        """Write an indexer's keys `[1, rows, dim]` behind the committed ones; all, `[1, length + rows, dim]`."""
        assert self.extra is not None, "a layer's indexer stored keys, which stored none when the model was examined"
        rows = indexer_key_states[:, None]
        keys, _ = self.extra.update(rows, rows[..., :0])
        return keys[:, 0].as_subclass(IndexKeys)

    def update_index(self, indexer_key_states: Tensor) -> Tensor:
        """The same for keys `[1, 1, rows, dim]` (MiniMax-M3); returns all, `[1, 1, length + rows, dim]`."""
        return self.update_indexer(indexer_key_states[:, 0]).as_subclass(Tensor)[:, None]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all committed rows, `[3, 1, length]`: a few indexers want them. None before the first token."""
        if not self.get_seq_length() or self.block is None:
            return None
        return torch.arange(self.get_seq_length(), device=self.block.keys.device).expand(3, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        """Ignored: the positions of committed rows are known, and the others may be discarded."""


class _ObserverLayer(ObserverLayer, _NoState):  # type: ignore[misc]
    """Records what a layer and its indexer store."""

    indexer_position_ids: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Record the keys `[1, rows, dim]`."""
        rows = indexer_key_states[:, None]
        self.extra_shape = LayerShape.of(rows, rows[..., :0])
        return indexer_key_states.as_subclass(IndexKeys)

    def update_index(self, indexer_key_states: Tensor) -> Tensor:
        """Record the keys `[1, 1, rows, dim]`."""
        self.update_indexer(indexer_key_states[:, 0])
        return indexer_key_states
