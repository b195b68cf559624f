"""A smaller causal LM with the target's tokenizer, drawing one token after the other.

When sampling, every token is a draw that carries the very row it was drawn from (same constraints, temperature and
truncation as the target's), with the cached siblings excluded. When decoding greedily it proposes its argmax as a
point, and with a seed the token that the seed's noise makes it choose (Daliri et al. 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from precedent.drafters.base import Candidates, Drafting, DraftRequest
from precedent.errors import GenerationError
from precedent.sampling import Coins, coupled_choice, largest_id, probs_of
from precedent.target import Slot, TargetModel, common_prefix
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Drawn, TreeBuilder, chain

CHOSEN = ("greedy", "coupled")
"""Modes in which the next token is a function of its row: whatever proposes it is a point."""

CATCH_UP_LIMIT = 32
"""Up to this many missed tokens ride along with the first draw; more are prefilled in chunks."""


MAX_IDLE_BYTES = 64 * 2**20
"""What KV caches of finished requests may take; the next turn of a conversation goes on with them."""


class DraftModelDrafter:
    """Shares one draft model between all requests; each keeps its own KV cache, caught up only when asked.

    A conversation's next turn, or another one under the same system prompt, finds what its tenant's requests have
    computed before. With `early_exit` the model is the target's own first layers: it reads what the target stored of
    the committed text, and what it writes behind that is overwritten when the target scores the tree.
    """

    name = "draft-model"
    draws = True

    def __init__(self, model: TargetModel, *, early_exit: bool = False) -> None:
        self._model, self._early_exit = model, early_exit
        self._pool = PrefixPool(model, MAX_IDLE_BYTES)

    def begin(self, request: DraftRequest) -> Drafting:
        """Start with what is known of the prompt: nothing is computed until the first draw."""
        context = list(request.prompt_ids)
        if self._early_exit and request.target_slot is not None:
            place: _OwnPlace | _TargetsPlace = _TargetsPlace(self._model, request.target_slot)
        else:
            place = _OwnPlace(self._model, self._pool, request.tenant, context)
        return _DraftModelDrafting(self.name, self._model, request, context, place)

    def close(self) -> None:
        """Let go of the KV caches of finished requests."""
        self._pool.shrink(0)


class _OwnPlace:
    """A KV cache of the draft model's own, which follows the committed text when it is asked to."""

    def __init__(self, model: TargetModel, pool: PrefixPool, tenant: str, context: list[int]) -> None:
        self._model, self._pool, self._tenant, self._context = model, pool, tenant, context
        self._slot = pool.acquire(tenant, context)

    @property
    def behind(self) -> int:
        """Committed tokens that its KV cache lacks."""
        return len(self._context) - common_prefix(self._slot.token_ids, self._context)

    def caught_up(self) -> tuple[Slot, CandidateTree]:
        """Rewind to the committed text; the first missed token becomes pending, the others are returned as a chain."""
        reused = common_prefix(self._slot.token_ids, self._context[:-1])
        self._model.rewind(self._slot, reused)
        if len(self._context) - reused > CATCH_UP_LIMIT:
            self._model.prefill(self._slot, self._context)
        self._slot.pending, *missed = self._context[len(self._slot.token_ids) :]
        return self._slot, chain(missed)

    def leave(self) -> None:
        """Keep the KV cache for the conversation's next turn."""
        slot, self._slot = self._slot, self._model.new_slot()
        self._pool.release(self._tenant, slot)


class _TargetsPlace:
    """The target's own KV cache, of which the first layers are read: there is never anything to catch up on."""

    behind = 1

    def __init__(self, model: TargetModel, target_slot: Callable[[], Slot]) -> None:
        self._num_layers, self._target_slot = len(model.kv_shape.layers), target_slot

    def caught_up(self) -> tuple[Slot, CandidateTree]:
        """The committed text as the target holds it, with its pending token."""
        slot = self._target_slot()
        return Slot(slot.kv.first_layers(self._num_layers), pending=slot.pending), EMPTY_TREE

    def leave(self) -> None:
        """The target's slot is the engine's to keep."""


class _DraftModelDrafting:
    def __init__(
        self,
        name: str,
        model: TargetModel,
        request: DraftRequest,
        context: list[int],
        place: _OwnPlace | _TargetsPlace,
    ) -> None:
        self._name, self._model, self._request = name, model, request
        self._context, self._place = context, place

    @property
    def behind(self) -> int:
        """Committed tokens that have not been through the draft model yet."""
        return self._place.behind

    def match(self, budget: int) -> Candidates:
        """A draft model has no points to offer before the shape of the tree is fixed."""
        return Candidates(self._name)

    @torch.inference_mode()
    def draw(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> None:
        """Draw a chain of up to `num_draws` tokens below the root; it ends at an end token."""
        path: list[int] = []
        parent, (slot, tail) = ROOT, self._place.caught_up()
        while len(path) < num_draws:
            row = self._model.score([(slot, tail)])[0][-1]
            token, parent = self._draw_below(builder, parent, path, row, coins)
            path.append(token)
            if token in self._request.end_token_ids:
                return
            self._model.commit(slot, tail, range(len(tail)), token)
            tail = EMPTY_TREE

    def _draw_below(
        self, builder: TreeBuilder, parent: int, path: Sequence[int], row: Tensor, coins: Coins
    ) -> tuple[int, int]:
        """Draw one child of `parent`; returns its token and its node."""
        shape = self._request.shape
        if shape is not None:
            output_ids = self._context[len(self._request.prompt_ids) :]
            row = shape((*output_ids, *path), row)
        if self._request.mode in CHOSEN:
            token = self._choose(row, path)
            return token, builder.add_point(parent, token, self._name)
        law = _law(_checked(probs_of(row, self._request.sampling)), builder.children(parent))
        token = coins.categorical(law.probs(), parent, f"draft {self._name}")
        return token, builder.add_draw(parent, token, law, self._name)

    def _choose(self, row: Tensor, path: Sequence[int]) -> int:
        """What the target would choose if it thought alike: the argmax, or the choice of the seed's noise."""
        sampling = self._request.sampling
        if sampling.greedy or sampling.seed is None:
            return largest_id(row)
        position = len(self._context) - len(self._request.prompt_ids) + len(path)
        return coupled_choice(probs_of(row, sampling), sampling.seed, position)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Remember the committed tokens; the KV cache is rewound to them at the next draw."""
        self._context.extend(token_ids)

    def end(self) -> None:
        """Drop what is held of the request."""
        self._place.leave()


def _checked(probs: Tensor) -> Tensor:
    """The very probabilities; a law that holds NaN would bend the answer unseen. Raises GenerationError."""
    if not float(probs.sum()) > 0.0:
        raise GenerationError("the draft model's probabilities hold NaN: load it in another dtype, or go without it")
    return probs


def _law(row: Tensor, siblings: tuple[int, ...]) -> Drawn:
    """The row without the siblings, unless nothing would be left to draw."""
    left = 1.0 - float(row[list(siblings)].sum()) if siblings else 1.0
    return Drawn(row, siblings) if siblings and left > 1e-6 else Drawn(row)
