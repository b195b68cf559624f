"""The drafter with a draft model: a smaller causal LM with the target's tokenizer, which draws token after token.

When sampling, each token carries the row it was sampled from (with the target's constraints, temperature and
truncation), and cached siblings are excluded. In greedy decoding it proposes its argmax as a fixed candidate; with a
seed, the token that the seed's noise chooses (Daliri et al. 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from precedent.config import SpeculationConfig
from precedent.drafters.base import Draw, DrawSession
from precedent.drafters.model.distribution import DraftedToken, sample_beside
from precedent.drafters.model.in_step import Drawing, Extending, RunningDrawing, draw_in_step
from precedent.drafters.model.place import DecoderPlace, OwnPlace, Place, TargetsPlace
from precedent.drafters.request import Request
from precedent.runtime.placing import placed
from precedent.sampling.coupling import coupled_choice
from precedent.sampling.probabilities import largest, largest_id, probs_of
from precedent.sampling.rng import Rng
from precedent.target import Slot, TargetModel
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Fixed, Sampled, TreeBuilder
from precedent.verify import verifier_of

CHOSEN = ("greedy", "coupled")
"""Modes in which the next token is a function of its row, so that every candidate is fixed."""

WITH_RUNNERS_UP = ("greedy", "traversal", "topdown")
"""Modes that verify a second sample below the same parent; coupled noise chooses only one token."""

MAX_IDLE_BYTES = 64 * 2**20
"""Bytes that KV caches of finished requests may take; the next turn of a conversation continues them."""


class DraftModelDrafter:
    """Shares one draft model between all requests; each has its own KV cache, which catches up only when drawing.

    A conversation's next turn, or another conversation with the same system prompt, reuses what its tenant's requests
    have computed. With `early_exit` the model is the target's own first layers: it reads the target's keys and values
    of the committed text, and what it writes behind them is overwritten when the target scores the tree. Distributions
    are moved to the device `hand_to` (None: they stay).
    """

    name = "draft-model"

    def __init__(
        self,
        model: TargetModel,
        *,
        early_exit: bool = False,
        hand_to: torch.device | None = None,
    ) -> None:
        self.model, self._early_exit, self._hand_to = model, early_exit, hand_to
        self.pool = PrefixPool(model, MAX_IDLE_BYTES)

    def begin(self, request: Request) -> DraftModelSession:
        """Start drafting, with the longest cached prefix of the prompt; computes nothing until the first draw."""
        context = list(request.prompt_ids)
        with self.at_work():
            place = self.place_of(request, context)
        return self.session(request, context, place)

    def session(self, request: Request, context: list[int], place: Place) -> DraftModelSession:
        """Return a session with keys and values in `place`."""
        return DraftModelSession(self, request, context, place)

    def place_of(self, request: Request, context: list[int]) -> Place:
        """Where a request's keys and values go; `context` grows with the committed text."""
        if self._early_exit and request.target_slot is not None:
            return TargetsPlace(self.model, request.target_slot)
        if self.model.encodes_prompt:
            return DecoderPlace(self.model, context)
        return OwnPlace(self.model, self.pool, request.tenant, context)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig) -> int:
        """Return the most bytes that a request takes in the draft model's KV cache, not counting those in an arena."""
        return self.kv_bytes(prompt_tokens, answer_tokens, speculation.max_nodes + speculation.max_draws + 1)

    def kv_bytes(self, prompt_tokens: int, answer_tokens: int, tree: int) -> int:
        """Return the same for a tree of at most this many tokens."""
        if self._early_exit or self.model.arena is not None:
            return 0
        return self.model.request_bytes(prompt_tokens, answer_tokens, tree, 1)

    def close(self) -> None:
        """Release the KV caches of finished requests."""
        self.pool.shrink(0)

    def at_work(self) -> AbstractContextManager[object]:
        """Return a context for all work on the model's tensors."""
        return nullcontext()

    def in_step(self, drawings: Sequence[Drawing | Extending]) -> list[RunningDrawing]:
        """Run the drawings of several requests, with one forward for all of them per token."""
        return draw_in_step(self.model, drawings, self.at_work)

    def handed_on(self, distribution: Sampled) -> Sampled:
        """Return the distribution on the device where the target verifies."""
        if self._hand_to is None or distribution.row.device == self._hand_to:
            return distribution
        logits = None if distribution.logits is None else distribution.logits.to(self._hand_to)
        return replace(distribution, row=distribution.row.to(self._hand_to), logits=logits)


class DraftModelSession(DrawSession):
    """A chain of tokens for one request, continued by one forward of the draft model per token.

    `chain` are the tokens drawn after the committed text; the first `num_shown` of them are in this step's tree.
    """

    def __init__(self, drafter: DraftModelDrafter, request: Request, context: list[int], place: Place) -> None:
        self.drafter, self.model, self.request = drafter, drafter.model, request
        self.chain: list[DraftedToken] = []
        self.num_shown = 0
        self._context, self._place = context, place
        self._keeps_logits = verifier_of(request.mode).keeps_draft_logits
        self._next: tuple[Slot, CandidateTree] | None = None
        self._row: Tensor | None = None
        self._rows: list[tuple[int, Tensor]] = []

    @property
    def group(self) -> object:
        """All sessions of one draft model draw together."""
        return self.drafter

    @property
    def names_runners_up(self) -> bool:  # type: ignore[override]
        """True in modes that verify a second sample below the same parent."""
        return self.request.mode in WITH_RUNNERS_UP

    @property
    def behind(self) -> int:
        """Committed tokens that the draft model has not computed yet."""
        return self._place.behind

    def draw(self, builder: TreeBuilder, num_draws: int, rng: Rng) -> None:
        """Add a chain of up to `num_draws` tokens below the root; it ends at an end token."""
        self.run(self.drawing(builder, num_draws, rng))

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Draw for several sessions of this draft model, with one forward for all of them per token."""
        drawings = [each.session.drawing(each.builder, each.number, each.rng) for each in draws]  # type: ignore[attr-defined]
        for draw, running in zip(draws, self.drafter.in_step(drawings), strict=True):
            draw.seconds, draw.error = running.seconds, running.error

    def drawing(self, builder: TreeBuilder, num_draws: int, rng: Rng) -> Drawing:
        """`draw` as a generator, to run in step with those of other requests."""
        if self.num_shown:  # the last step ended without a verdict
            self.forget()
        parent, purpose, self._rows = ROOT, f"draft {self.drafter.name}", []
        while self.num_shown < num_draws:
            if self.num_shown == len(self.chain):
                if not (yield from self.extend(rng, parent, purpose, builder.children(parent))):
                    return
                assert self._row is not None
                self._rows.append((parent, self._row))
            parent = self.handed_on(self.chain[self.num_shown]).add_to(builder, parent, self.drafter.name)
            self.num_shown += 1

    def forget(self) -> None:
        """Drop the chain."""
        self.chain, self.num_shown, self._next = [], 0, None

    @torch.inference_mode()
    def draw_runners_up(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Add a token beside each of the first `number` just drawn: the next best, or one without replacement."""
        for parent, row in self._rows[:number]:
            with self.drafter.at_work():
                runner_up = self._runner_up(row, parent, builder.children(parent), rng)
            if runner_up is not None:
                node = self.handed_on(runner_up).add_to(builder, parent, self.drafter.name)
                builder.runners_up.add(node)

    def _runner_up(self, row: Tensor, parent: int, taken: tuple[int, ...], rng: Rng) -> DraftedToken | None:
        """A second token below `parent`, or None if none is left."""
        if self.request.mode in CHOSEN:
            left = row.index_fill(0, placed(np.array(taken), row.device), -torch.inf)
            logit, token = largest(left)
            return None if logit == -torch.inf else DraftedToken(token, Fixed())
        drawn = sample_beside(row, taken, rng, parent, f"runner-up {self.drafter.name}")
        return drawn if isinstance(drawn.distribution, Sampled) and drawn.distribution.excluded == taken else None

    def run(self, drawing: Drawing | Extending) -> None:
        """Run a drawing of this session alone. Raises its error."""
        error = self.drafter.in_step([drawing])[0].error
        if error is not None:
            raise error

    def extend(self, rng: Rng, node: int, purpose: str, siblings: tuple[int, ...]) -> Extending:
        """Extend the chain by one token; False if it already ends with an end token."""
        drafted = [each.token_id for each in self.chain]
        if drafted and drafted[-1] in self.request.end_token_ids:
            return False
        with self.drafter.at_work():
            wanted = self._next or self._place.caught_up(drafted)
        if wanted is None:
            return False
        slot, tail = wanted
        logits = yield wanted
        with self.drafter.at_work():
            row = self._shaped(_kept(logits[-1, : self.request.num_tokens]), drafted)
            if self.request.shape is not None and bool(row.isneginf().all()):
                return False  # a grammar allows only tokens that this model's head does not cover
            new = self._drafted(row, drafted, rng, node, purpose, siblings)
            self._row = new.distribution.row if isinstance(new.distribution, Sampled) else row
            self.model.commit(slot, tail, range(len(tail)), new.token_id)
            if not drafted:
                slot.kv.mark()  # recurrent states can come back here when what is drawn now is rejected
        self.chain.append(new)
        self._next = slot, EMPTY_TREE
        return True

    def _shaped(self, row: Tensor, drafted: Sequence[int]) -> Tensor:
        shape = self.request.shape
        if shape is None:
            return row
        return shape((*self._context[len(self.request.prompt_ids) :], *drafted), row)

    def _drafted(
        self, row: Tensor, drafted: Sequence[int], rng: Rng, node: int, purpose: str, siblings: tuple[int, ...]
    ) -> DraftedToken:
        """The next token: chosen in the modes of `CHOSEN`, otherwise sampled."""
        if self.request.mode in CHOSEN:
            return DraftedToken(self._choose(row, self.output_length + len(drafted)), Fixed())
        new = sample_beside(probs_of(row, self.request.sampling), siblings, rng, node, purpose)
        if self._keeps_logits and isinstance(new.distribution, Sampled):
            return new._replace(distribution=replace(new.distribution, logits=row))
        return new

    def _choose(self, row: Tensor, position: int) -> int:
        """What the target would choose from the same row: the argmax, or the choice of the seed's noise."""
        sampling = self.request.sampling
        if sampling.greedy or sampling.seed is None:
            return largest_id(row)
        return coupled_choice(probs_of(row, sampling), sampling.seed, position)

    def handed_on(self, drafted: DraftedToken) -> DraftedToken:
        """Return the token with its distribution where the target verifies."""
        distribution = drafted.distribution
        return (
            drafted._replace(distribution=self.drafter.handed_on(distribution))
            if isinstance(distribution, Sampled)
            else drafted
        )

    @property
    def output_length(self) -> int:
        """Committed tokens of the answer."""
        return len(self._context) - len(self.request.prompt_ids)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Append the committed tokens; the next draw rewinds the KV cache to them."""
        self._context.extend(token_ids)
        self.forget()

    def end(self) -> None:
        """Release the request's KV cache and samples."""
        with self.drafter.at_work():
            self._place.leave()
        self.forget()
        self._row, self._rows = None, []


def _kept(row: Tensor) -> Tensor:
    """The row, copied if keeping it would keep the logits of many other rows alive."""
    return row.clone() if row.untyped_storage().nbytes() > 2 * row.nbytes else row
