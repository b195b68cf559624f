"""The drafter `block-draft`: one forward fills a block, whose likeliest paths are fixed candidates with estimates.

The planner asks for a forward only where it pays (`ForwardSession`), merges the candidates with those of the others,
and calibrates them: the depth, the estimate and the draft's confidence make a candidate's bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.config import SpeculationConfig
from precedent.drafters.base import NODE, Asked, Candidates, Drafter, ForwardSession
from precedent.drafters.model.place import SlotOf
from precedent.drafters.request import Request
from precedent.errors import ConfigError, GenerationError
from precedent.runtime.compiled import Floats, compiled
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Rows, chain_rows
from precedent.target.model import TargetModel
from precedent_drafts.block_draft import BlockDraft

CHUNK = 512
"""Tokens of a text whose keys and values are computed at once."""


@dataclass(slots=True)
class BlockPlace:
    """A request's keys and values in the draft, of its text from token `first` on."""

    target_slot: SlotOf
    first: int
    kv: KVCache

    @property
    def behind(self) -> int:
        """Committed tokens whose keys and values are missing."""
        committed: int = self.target_slot().kv.length
        return max(0, committed - self.first - self.kv.length)


@dataclass(frozen=True, slots=True)
class Filled:
    """A filled block: `logits` `[block_size, num_head_tokens]` and the `confidence` `[block_size]` in (0, 1).

    Row k is the draft's belief about token k behind the last one, whatever stands between them. Without a Markov term
    the logits stay on the draft's device: they are as wide as a whole vocabulary.
    """

    logits: Tensor
    confidence: Tensor


class BlockModel:
    """A block draft beside its target, which from now on keeps the outputs of the layers that the draft reads, if any.

    Raises ConfigError for layers that the target lacks, and UnsupportedError where they cannot be kept.
    """

    def __init__(self, draft: BlockDraft, target: TargetModel) -> None:
        self.draft, self.settings = draft, draft.settings
        self._outputs = target.keep_layer_outputs(self.settings.reads) if self.settings.reads else None
        self._rows = TargetModel(draft)
        if self._rows.one_path:
            raise ConfigError("the layers of this block draft follow single paths, so no block can be filled")
        self._columns = torch.full((draft.inputs.mask_id,), draft.head.token_ids.numel())
        self._columns[draft.head.token_ids.cpu()] = torch.arange(draft.head.token_ids.numel())
        self._dtype = torch.float64 if draft.dtype == torch.float64 else torch.float32
        self._place = torch.device("cpu") if self.settings.markov_rank else draft.device
        self.left = draft.markov.left.detach().to(self._place, self._dtype)
        self.right = draft.markov.right.detach().to(self._place, self._dtype)
        self.token_ids = draft.head.token_ids.cpu()

    def kv_bytes(self, prompt_tokens: int, answer_tokens: int) -> int:
        """The most bytes that a request takes in the draft's KV cache."""
        settings = self.settings
        context = min(prompt_tokens, settings.context_tokens)
        return self._rows.kv_bytes(context + answer_tokens + settings.block_size + 1)

    def place_beside(self, target_slot: SlotOf, prompt_tokens: int) -> BlockPlace:
        """Where a request's text is read from its last `context_tokens` prompt tokens on; computes nothing yet."""
        first = max(0, prompt_tokens - 1 - self.settings.context_tokens)
        return BlockPlace(target_slot, first, self._rows.new_slot().kv)

    def links(self, before: int) -> Tensor:
        """What the Markov term adds to the row behind the token `before`, `[num_head_tokens]`."""
        added: Tensor = self.left[self._columns[before]] @ self.right
        return added

    def catch_up(self, place: BlockPlace) -> None:
        """Compute the keys and values of committed tokens that are missing."""
        slot = place.target_slot()  # a request's slot only grows
        while place.behind:
            start = place.first + place.kv.length
            end = min(slot.kv.length, start + CHUNK)
            place.kv.reserve(end - place.first + self.settings.block_size + 1)
            if self._outputs is None:
                self._rows.runner.fill(chain_rows(place.kv, slot.token_ids[start:end]))
            else:
                self._write(place.kv, self._outputs.of(slot.kv, start, end))
            place.kv.keep(range(end - start))

    def _write(self, kv: KVCache, states: Tensor) -> None:
        """Write keys and values behind those in `kv`, from what the target saw of these tokens."""
        pairs = self.draft.keys_and_values(states.to(self.draft.device), kv.length)
        for index, (keys, values) in enumerate(pairs):
            kv.layer(index).write(keys, values)

    @torch.inference_mode()
    def fill(self, batch: Sequence[tuple[BlockPlace, int]]) -> list[Filled]:
        """Fill a block behind the last token of each text, `settings.iterations` forwards for all together."""
        for place, _ in batch:
            self.catch_up(place)
        tokens = [[last, *[self.draft.inputs.mask_id] * self.settings.block_size] for _, last in batch]
        filled = self._forward([place for place, _ in batch], tokens)
        for done in range(1, self.settings.iterations):
            for row, each in zip(tokens, filled, strict=True):
                self._unmask(row, each, done)
            again = self._forward([place for place, _ in batch], tokens)
            filled = [self._merged(row, *pair) for row, *pair in zip(tokens, filled, again, strict=True)]
        return filled

    def _forward(self, places: Sequence[BlockPlace], tokens: Sequence[Sequence[int]]) -> list[Filled]:
        count = self.settings.block_size + 1
        depths, all_see_all = np.arange(count), np.ones((count, count), dtype=np.bool_)
        rows = [
            Rows(place.kv, row, depths, all_see_all, causal_in_windows=True)
            for place, row in zip(places, tokens, strict=True)
        ]
        found = [logits[1:].to(self._place, self._dtype) for logits in self._rows.runner.logits(rows)]
        return [Filled(logits[:, :-1], logits[:, -1].sigmoid().cpu()) for logits in found]

    def _unmask(self, row: list[int], filled: Filled, done: int) -> None:
        """Put likeliest tokens where the draft is surest, so that `done / iterations` of the block is known."""
        masked = [k for k in range(self.settings.block_size) if row[k + 1] == self.draft.inputs.mask_id]
        count = -(-self.settings.block_size * done // self.settings.iterations)
        chances, best = filled.logits.softmax(-1).max(-1)
        surest = sorted(masked, key=lambda k: -float(chances[k]))
        for k in surest[: count - (self.settings.block_size - len(masked))]:
            row[k + 1] = int(self.token_ids[int(best[k])])

    def _merged(self, row: Sequence[int], before: Filled, now: Filled) -> Filled:
        """What the draft believed of a position while it was still masked."""
        masked = torch.tensor([token == self.draft.inputs.mask_id for token in row[1:]])
        return Filled(
            torch.where(masked[:, None].to(self._place), now.logits, before.logits),
            torch.where(masked, now.confidence, before.confidence),
        )


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


class BlockDrafter(Drafter):
    """Shares one block draft between all requests; each has its own keys and values of its text."""

    name = "block-draft"

    def __init__(self, model: BlockModel) -> None:
        self.model = model

    def begin(self, request: Request) -> BlockSession:
        """Start drafting; computes nothing until the first block. Raises ConfigError without a place in the target."""
        if request.target_slot is None:
            raise ConfigError("block-draft reads the layers of its target, and this request names no target_slot")
        place = self.model.place_beside(request.target_slot, len(request.prompt_ids))
        return BlockSession(self, request, place)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig) -> int:
        """The most bytes that a request takes in the draft's KV cache."""
        return self.model.kv_bytes(prompt_tokens, answer_tokens)


class BlockSession(ForwardSession):
    """One request's blocks: its place in the draft, and the last token of its text."""

    def __init__(self, drafter: BlockDrafter, request: Request, place: BlockPlace) -> None:
        self._drafter, self._model, self._request, self._place = drafter, drafter.model, request, place
        self._last = request.prompt_ids[-1] if request.prompt_ids else None

    @property
    def behind(self) -> int:
        """Committed tokens whose keys and values are missing."""
        return self._place.behind

    @property
    def group(self) -> object:
        """All sessions of one block draft run together."""
        return self._drafter

    def committed(self, token_ids: Sequence[int]) -> None:
        """Continue behind these tokens."""
        if self._last is not None and len(token_ids):
            self._last = token_ids[-1]

    def end(self) -> None:
        """Release the keys and values."""
        self._last = None
        self._place.kv.rewind(0)

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
