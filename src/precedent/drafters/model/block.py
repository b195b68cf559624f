"""The drafter `block-draft`: one forward fills a block, whose likeliest paths are fixed candidates with estimates.

The planner asks for a forward only where it pays (`ForwardSession`), merges the candidates with those of the others,
and calibrates them: the depth, the estimate and the draft's confidence make a candidate's bin. Where its folder says
`"proposes": "chain"`, and the request samples, a chain is drawn instead, with the distributions that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.drafters.base import NODE, Asked, Candidates, ForwardSession
from precedent.drafters.model.best_first import best_first
from precedent.drafters.model.block_chain import BlockChainSession
from precedent.drafters.model.drafter import CHOSEN
from precedent.drafters.request import Request
from precedent.errors import ConfigError, GenerationError
from precedent.target.block.model import BlockModel, BlockPlace, Filled
from precedent.target.block.settings import CHAIN

CHOICES = 32
"""Likeliest tokens per position that may become candidates."""

DEPTH_LEVELS, ESTIMATE_LEVELS, CONFIDENCE_LEVELS = 8, 8, 4
"""Levels that are told apart in a candidate's bin."""

Floats = NDArray[np.float64]


class BlockDrafter:
    """Shares one block draft between all requests; each has its own keys and values of its text."""

    name = "block-draft"

    def __init__(self, model: BlockModel) -> None:
        self.model = model

    def begin(self, request: Request) -> BlockSession | BlockChainSession:
        """Start drafting; computes nothing until the first block. Raises ConfigError without a place in the target."""
        if request.target_slot is None:
            raise ConfigError("block-draft reads the layers of its target, and this request names no target_slot")
        place = self.model.place_beside(request.target_slot, len(request.prompt_ids))
        if self.model.settings.proposes == CHAIN and request.mode not in CHOSEN:
            return BlockChainSession(self.model, self.name, request, place)
        return BlockSession(self, request, place)

    def close(self) -> None:
        """Do nothing: requests share nothing but weights."""


class BlockSession(ForwardSession):
    """One request's blocks."""

    def __init__(self, drafter: BlockDrafter, request: Request, place: BlockPlace) -> None:
        self._drafter, self._model, self._request, self._place = drafter, drafter.model, request, place
        self._last = request.prompt_ids[-1] if request.prompt_ids else None

    @property
    def group(self) -> object:
        """All sessions of one block draft run together."""
        return self._drafter

    @property
    def behind(self) -> int:
        """Committed tokens whose keys and values are missing."""
        return self._place.behind

    def match_together(self, asked: Sequence[Asked]) -> None:
        """Fill a block for each of these sessions in one forward."""
        able = [each for each in asked if each.budget > 0 and each.session._last is not None]  # type: ignore[attr-defined]
        if not able:
            return
        blocks = self._model.fill([(each.session._place, each.session._last) for each in able])  # type: ignore[attr-defined]
        for each, block in zip(able, blocks, strict=True):
            try:
                each.candidates = each.session._candidates(block, each.budget)  # type: ignore[attr-defined]
            except Exception as error:
                each.error = error

    def filled(self, budget: int) -> tuple[Filled, Candidates]:
        """A block behind the last token, and its candidates, for measurements."""
        assert self._last is not None
        (block,) = self._model.fill([(self._place, self._last)])
        return block, self._candidates(block, budget)

    def _candidates(self, block: Filled, budget: int) -> Candidates:
        """The likeliest paths of a block, at most `budget` nodes."""
        assert self._last is not None
        tokens, first, steps = chances(self._model, self._last, block, self._temperature, self._request.num_tokens)
        ends = np.isin(tokens, list(self._request.end_token_ids))
        depths, chosen, parents = best_first(first, steps, ends, budget)
        nodes = np.empty(depths.size, NODE)
        nodes["token_id"], nodes["parent"] = tokens[depths, chosen], parents
        before = chosen[np.maximum(parents, 0)]
        below = steps[np.maximum(depths - 1, 0), before, chosen] if steps.size else first[chosen]
        nodes["estimate"] = np.clip(np.where(depths == 0, first[chosen], below), 1e-6, 1.0)
        nodes["bin"] = _bins(depths, nodes["estimate"], block.confidence.double().numpy()[depths])
        return Candidates(self._drafter.name, nodes)

    @property
    def _temperature(self) -> float:
        """At which the candidates' probabilities are estimated; greedy requests use the draft's own."""
        sampling = self._request.sampling
        return 1.0 if sampling.greedy else max(sampling.temperature, 0.05)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Continue behind these tokens."""
        if self._last is not None and len(token_ids):
            self._last = token_ids[-1]

    def end(self) -> None:
        """Release the keys and values."""
        self._last = None
        self._place.kv.rewind(0)


def chances(
    model: BlockModel, last: int, block: Filled, temperature: float, num_tokens: int | None
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """What a block says of its likeliest tokens: their ids, and their probabilities behind each other.

    Ids are `[positions, choices]`; probabilities `[choices]` at the first position, behind `last`, and `[positions - 1,
    choices, choices]` at each next one, behind each choice at the one before. Choices are the likeliest tokens with the
    Markov term of an average token before them; all other tokens keep the mass that the block alone gives them. Raises
    GenerationError for a block that holds NaN.
    """
    logits = block.logits / temperature
    if num_tokens is not None:
        logits[:, model.token_ids >= num_tokens] = -torch.inf
    if not model.settings.markov_rank:
        return _independent(model, logits)
    logits[0] += model.links(last) / temperature
    probs = logits.softmax(-1)
    _check(probs)
    usual = probs[:-1] @ model.left[:-1] @ model.right / temperature  # the Markov term of an average token before
    logits[1:] += usual
    columns = logits.topk(min(CHOICES, logits.shape[-1])).indices
    alone = probs.gather(-1, columns)
    rest = (1.0 - alone.sum(-1)).clamp(min=0.0)
    links = model.left[columns[:-1]] @ model.right[:, columns[1:]].permute(1, 0, 2) / temperature
    grown = alone[1:, None] * links.exp()
    steps = grown / (grown.sum(-1) + rest[1:, None])[..., None]
    return model.token_ids[columns].numpy(), alone[0].double().numpy(), steps.double().contiguous().numpy()


def _independent(model: BlockModel, logits: Tensor) -> tuple[NDArray[np.int64], Floats, Floats]:
    """`chances` without a Markov term: a whole vocabulary is passed over twice, on the device of the logits."""
    top, columns = logits.topk(min(CHOICES, logits.shape[-1]))
    alone = (top - logits.logsumexp(-1, keepdim=True)).exp().double().cpu()
    _check(alone)
    steps = alone[1:, None].expand(-1, alone.shape[1], -1)
    return model.token_ids[columns.cpu()].numpy(), alone[0].numpy(), steps.contiguous().numpy()


def _check(probs: Tensor) -> None:
    if bool(torch.isnan(probs).any()):
        raise GenerationError("the block draft's logits hold NaN or nothing: load it in another dtype, or leave it out")


def _bins(depths: NDArray[np.int64], estimates: Floats, confidence: Floats) -> NDArray[np.int64]:
    """A small number of depth, estimate and confidence, under which the planner calibrates a candidate."""
    depth = np.minimum(depths, DEPTH_LEVELS - 1)
    estimate = np.minimum((estimates * ESTIMATE_LEVELS).astype(np.int64), ESTIMATE_LEVELS - 1)
    sure = np.minimum((confidence * CONFIDENCE_LEVELS).astype(np.int64), CONFIDENCE_LEVELS - 1)
    found: NDArray[np.int64] = (depth * ESTIMATE_LEVELS + estimate) * CONFIDENCE_LEVELS + sure
    return found
