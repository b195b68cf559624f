"""Keys of an indexer, which chooses the tokens that a layer attends to (DeepSeek Sparse Attention).

Every new row scores all keys of its sequence and attends to the `k` that score best among those it may see. The keys
are a second cache beside the layer's own. transformers computes the scores; hidden keys score minus infinity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

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
