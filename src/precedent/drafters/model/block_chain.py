"""A chain sampled from a filled block: each token carries the distribution that it was sampled from.

Position k is sampled from the block's row k with the Markov term of the token sampled before it, under the request's
constraints and sampling settings, and without the siblings that are in the tree already. So it is verified as any
sample is (`drafters.model.drafter`), though one forward gives all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precedent.drafters.base import DrawSession
from precedent.drafters.model.distribution import sample_beside
from precedent.drafters.request import Request
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import Rng
from precedent.target.block.model import BlockModel, BlockPlace
from precedent.tree import ROOT, TreeBuilder


class BlockChainSession(DrawSession):
    """One request's chains."""

    at_once = True

    def __init__(self, model: BlockModel, name: str, request: Request, place: BlockPlace) -> None:
        self._model, self._name, self._request, self._place = model, name, request, place
        self._output: list[int] = []
        self._last = request.prompt_ids[-1] if request.prompt_ids else None

    @property
    def behind(self) -> int:
        """Committed tokens whose keys and values are missing."""
        return self._place.behind

    @torch.inference_mode()
    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Add a chain of up to `number` tokens, at most a block; it ends at an end token."""
        if self._last is None or not number:
            return
        (block,) = self._model.fill([(self._place, self._last)])
        parent, path = ROOT, [self._last]
        for logits in block.logits[:number]:
            row = self._shaped(logits + self._model.links(path[-1]), path[1:])
            if (path[-1] in self._request.end_token_ids and len(path) > 1) or not bool((row > -torch.inf).any()):
                return
            probs = probs_of(row, self._request.sampling)
            drafted = sample_beside(probs, builder.children(parent), rng, parent, f"draft {self._name}")
            parent = drafted.add_to(builder, parent, self._name)
            path.append(drafted.token_id)

    def _shaped(self, logits: Tensor, drafted: Sequence[int]) -> Tensor:
        """The head's logits in a row of the target's width, with the request's constraints."""
        request, ids = self._request, self._model.token_ids
        width = self._model.draft.inputs.mask_id if request.num_tokens is None else request.num_tokens
        row = logits.new_full((width,), -torch.inf)
        row[ids[ids < width]] = logits[ids < width]
        row = row.to(self._model.draft.device)
        return row if request.shape is None else request.shape((*self._output, *drafted), row)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Continue behind these tokens."""
        if self._last is not None and len(token_ids):
            self._output.extend(token_ids)
            self._last = token_ids[-1]

    def end(self) -> None:
        """Release the keys and values."""
        self._last = None
        self._place.kv.rewind(0)
