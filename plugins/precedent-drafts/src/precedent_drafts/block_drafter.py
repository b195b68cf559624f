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

from precedent.config import SpeculationConfig
from precedent.drafters.base import NODE, Asked, Candidates, DrawSession, ForwardSession, ModelSession
from precedent.drafters.model.distribution import sample_beside
from precedent.drafters.model.drafter import CHOSEN
from precedent.drafters.request import Request
from precedent.errors import ConfigError, GenerationError
from precedent.runtime.compiled import Floats, compiled
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import Rng
from precedent.tree import ROOT, TreeBuilder
from precedent_drafts.block_draft import CHAIN
from precedent_drafts.block_model import BlockModel, BlockPlace, Filled

_NONE = -1

Places = NDArray[np.int64]


@compiled
def best_first(first: Floats, steps: Floats, ends: NDArray[np.bool_], budget: int) -> tuple[Places, Places, Places]:
    """The `budget` likeliest paths as a tree: depth, choice and parent of each node, `[num_nodes]`, best first.

    `first` `[choices]` are the probabilities at the first position, `steps` `[positions - 1, choices, choices]` those
    of each choice at the next position after each at this one. `ends` `[positions, choices]` marks choices below which
    nothing hangs. Probability 0 is never taken; of equals the one whose parent came first, then the lower choice.
    """
    positions, root, count = steps.shape[0] + 1, budget, 0  # the root's entries are the last ones
    depths, chosen, parents = np.empty(budget, np.int64), np.empty(budget, np.int64), np.empty(budget, np.int64)
    paths, taken = np.ones(budget + 1), np.zeros((budget + 1, first.size), np.bool_)
    best, reach = np.full(budget + 1, _NONE, np.int64), np.zeros(budget + 1)
    best[root], reach[root] = _best_left(first, taken[root])
    while count < budget:
        at = root
        for node in range(count):
            at = node if reach[node] > reach[at] else at
        if reach[at] <= 0.0:
            break
        depths[count], chosen[count] = 0 if at == root else depths[at] + 1, best[at]
        parents[count], paths[count] = _NONE if at == root else at, reach[at]
        taken[at, best[at]] = True
        for node in (at, count):
            if node == root:
                best[node], reach[node] = _best_left(first, taken[node])
            elif depths[node] + 1 < positions and not ends[depths[node], chosen[node]]:
                best[node], chance = _best_left(steps[depths[node], chosen[node]], taken[node])
                reach[node] = paths[node] * chance
        count += 1
    return depths[:count], chosen[:count], parents[:count]


@compiled
def _best_left(chances: Floats, taken: NDArray[np.bool_]) -> tuple[int, float]:
    """The likeliest choice that is not taken, and its probability; 0 if none is left."""
    best, chance = _NONE, 0.0
    for choice in range(chances.size):
        if not taken[choice] and chances[choice] > chance:
            best, chance = choice, chances[choice]
    return best, chance


CHOICES = 32
"""Likeliest tokens per position that may become candidates."""

DEPTH_LEVELS, ESTIMATE_LEVELS, CONFIDENCE_LEVELS = 8, 8, 4
"""Levels that are told apart in a candidate's bin."""


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
            return BlockChainSession(self, request, place)
        return BlockSession(self, request, place)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig) -> int:
        """The most bytes that a request takes in the draft's KV cache."""
        return self.model.kv_bytes(prompt_tokens, answer_tokens)

    def close(self) -> None:
        """Do nothing: requests share nothing but weights."""


class _InBlocks(ModelSession):
    """One request's place in a block draft, and the last token of its text."""

    def __init__(self, drafter: BlockDrafter, request: Request, place: BlockPlace) -> None:
        self._drafter, self._model, self._request, self._place = drafter, drafter.model, request, place
        self._last = request.prompt_ids[-1] if request.prompt_ids else None

    @property
    def behind(self) -> int:
        """Committed tokens whose keys and values are missing."""
        return self._place.behind

    def committed(self, token_ids: Sequence[int]) -> None:
        """Continue behind these tokens."""
        if self._last is not None and len(token_ids):
            self._last = token_ids[-1]

    def end(self) -> None:
        """Release the keys and values."""
        self._last = None
        self._place.kv.rewind(0)


class BlockSession(_InBlocks, ForwardSession):
    """One request's blocks."""

    @property
    def group(self) -> object:
        """All sessions of one block draft run together."""
        return self._drafter

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


class BlockChainSession(_InBlocks, DrawSession):
    """One request's chains."""

    at_once = True

    def __init__(self, drafter: BlockDrafter, request: Request, place: BlockPlace) -> None:
        super().__init__(drafter, request, place)
        self._output: list[int] = []

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
            drafted = sample_beside(probs, builder.children(parent), rng, parent, f"draft {self._drafter.name}")
            parent = drafted.add_to(builder, parent, self._drafter.name)
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
        self._output.extend(token_ids)
        super().committed(token_ids)
