"""The drafter with a draft model: a smaller causal LM with the target's tokenizer, which draws token after token.

When sampling, each token carries the row it was sampled from (with the target's constraints, temperature and
truncation), and cached siblings are excluded. In greedy decoding it proposes its argmax as a fixed candidate; with a
seed, the token that the seed's noise chooses (Daliri et al. 2408.07978). What it draws while the target scores
(`precedent.decoding.pearl`) goes into the next tree, if the committed text agrees with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from precedent.config import SpeculationConfig, has_judge
from precedent.drafters.base import Draw
from precedent.drafters.model.distribution import sample_beside
from precedent.drafters.model.in_step import Drawing, Extending, RunningDrawing, draw_in_step
from precedent.drafters.model.lookahead import DraftedToken, DrawsAhead, Lookahead
from precedent.drafters.model.place import DecoderPlace, OwnPlace, Place, TargetsPlace
from precedent.drafters.request import Request
from precedent.runtime.placing import placed
from precedent.sampling.coupling import coupled_choice
from precedent.sampling.probabilities import largest, largest_id, probs_of
from precedent.sampling.rng import Rng
from precedent.target import Slot, TargetModel
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Fixed, Sampled, TreeBuilder

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
    are moved to the device `hand_to` (None: they stay). With `own_stream` a model on a GPU uses a CUDA stream of its
    own, so that it can draw while the target scores.
    """

    name = "draft-model"

    def __init__(
        self,
        model: TargetModel,
        *,
        early_exit: bool = False,
        hand_to: torch.device | None = None,
        own_stream: bool = False,
    ) -> None:
        self._model, self._early_exit, self._hand_to, self._draws_ahead = model, early_exit, hand_to, own_stream
        self._stream = _stream_on(model.device) if own_stream else None
        self.pool = PrefixPool(model, MAX_IDLE_BYTES)

    def begin(self, request: Request) -> DrawsAhead:
        """Start drafting, with the longest cached prefix of the prompt; computes nothing until the first draw."""
        context = list(request.prompt_ids)
        with self.at_work():
            place = self.place_of(request, context)
        return _DraftModelSession(self, self._model, request, context, place)

    def place_of(self, request: Request, context: list[int]) -> Place:
        """Where a request's keys and values go; `context` grows with the committed text."""
        if self._early_exit and request.target_slot is not None:
            return TargetsPlace(self._model, request.target_slot)
        if self._model.encodes_prompt:
            return DecoderPlace(self._model, context)
        return OwnPlace(self._model, self.pool, request.tenant, context)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig) -> int:
        """The most bytes that a request takes in the draft model's KV cache, beyond those in an arena."""
        if self._early_exit or self._model.arena is not None:
            return 0
        tree, ahead = speculation.max_nodes + speculation.max_draws + 1, speculation.max_draws + 1
        return self._model.request_bytes(prompt_tokens, answer_tokens, tree + ahead * self._draws_ahead, 1)

    def close(self) -> None:
        """Release the KV caches of finished requests."""
        self.pool.shrink(0)

    def at_work(self) -> AbstractContextManager[object]:
        """A context for all work on the model's tensors, which keeps it in order across threads."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def in_step(self, drawings: Sequence[Drawing | Extending]) -> list[RunningDrawing]:
        """Run the drawings of several requests, with one forward for all of them per token."""
        return draw_in_step(self._model, drawings, self.at_work)

    def handed_on(self, distribution: Sampled) -> Sampled:
        """The distribution, ready for the target's thread: on its device, and safe from being overwritten."""
        tensors = [each for each in (distribution.row, distribution.logits) if each is not None]
        if self._stream is not None:  # otherwise their memory may be reused before the target's stream has read it
            for each in tensors:
                each.record_stream(torch.cuda.current_stream(each.device))
        if self._hand_to is None or distribution.row.device == self._hand_to:
            return distribution
        row, *logits = (each.to(self._hand_to) for each in tensors)
        return replace(distribution, row=row, logits=logits[0] if logits else None)


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream that waits for all work queued on this GPU so far; None for other devices."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


class _DraftModelSession(DrawsAhead):
    def __init__(
        self,
        drafter: DraftModelDrafter,
        model: TargetModel,
        request: Request,
        context: list[int],
        place: Place,
    ) -> None:
        self._drafter, self._model, self._request = drafter, model, request
        self._context, self._place, self._ahead = context, place, Lookahead()
        self._next: tuple[Slot, CandidateTree] | None = None
        self._row: Tensor | None = None
        self._rows: list[tuple[int, Tensor]] = []

    @property
    def group(self) -> object:
        """All sessions of one draft model draw together."""
        return self._drafter

    @property
    def names_runners_up(self) -> bool:  # type: ignore[override]
        """True in modes that verify a second sample below the same parent."""
        return self._request.mode in WITH_RUNNERS_UP

    @property
    def behind(self) -> int:
        """Committed tokens that the draft model has not computed yet."""
        return self._place.behind

    @property
    def at_hand(self) -> int:
        """Samples beyond the committed text that no tree has held yet."""
        return self._ahead.unseen

    def draw(self, builder: TreeBuilder, num_draws: int, rng: Rng) -> None:
        """Add a chain of up to `num_draws` tokens below the root, drawn ahead or now; it ends at an end token."""
        self._alone(self.drawing(builder, num_draws, rng))

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Draw for several sessions of this draft model, with one forward for all of them per token."""
        drawings = [each.session.drawing(each.builder, each.number, each.rng) for each in draws]  # type: ignore[attr-defined]
        for draw, running in zip(draws, self._drafter.in_step(drawings), strict=True):
            draw.seconds, draw.error = running.seconds, running.error

    def drawing(self, builder: TreeBuilder, num_draws: int, rng: Rng) -> Drawing:
        """`draw` as a generator, to run in step with those of other requests."""
        if self._ahead.shown:  # the last step ended without a verdict
            self._ahead, self._next = Lookahead(), None
        parent, purpose, self._rows = ROOT, f"draft {self._drafter.name}", []
        while self._ahead.shown < num_draws:
            if not self._ahead.unseen:
                if not (yield from self._extend(rng, parent, purpose, builder.children(parent))):
                    return
                assert self._row is not None
                self._rows.append((parent, self._row))
            drafted = self._ahead.chain[self._ahead.shown]
            parent = self._handed_on(drafted).add_to(builder, parent, self._drafter.name)
            self._ahead.shown += 1

    @torch.inference_mode()
    def draw_runners_up(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Add a token beside each of the first `number` just drawn: the next best, or one without replacement."""
        for parent, row in self._rows[:number]:
            with self._drafter.at_work():
                runner_up = self._runner_up(row, parent, builder.children(parent), rng)
            if runner_up is not None:
                node = self._handed_on(runner_up).add_to(builder, parent, self._drafter.name)
                builder.runners_up.add(node)

    def _runner_up(self, row: Tensor, parent: int, taken: tuple[int, ...], rng: Rng) -> DraftedToken | None:
        """A second token below `parent`, or None if none is left."""
        if self._request.mode in CHOSEN:
            left = row.index_fill(0, placed(np.array(taken), row.device), -torch.inf)
            logit, token = largest(left)
            return None if logit == -torch.inf else DraftedToken(token, Fixed())
        drawn = sample_beside(row, taken, rng, parent, f"runner-up {self._drafter.name}")
        return drawn if isinstance(drawn.distribution, Sampled) and drawn.distribution.excluded == taken else None

    def draw_ahead(self, rng: Rng) -> bool:
        """Draw one more token beyond all samples so far; its random number is keyed by its position in the answer."""
        before = len(self._ahead.chain)
        place, purpose = self._output_length + before, f"draft {self._drafter.name} ahead"
        self._alone(self._extend(rng, place, purpose, ()))
        return len(self._ahead.chain) > before

    def extended(self, tree: CandidateTree) -> CandidateTree:
        """The scored tree, extended by the samples at hand that its rows can verify."""
        return self._ahead.extended(tree, self._drafter.name, self._handed_on)

    def _alone(self, drawing: Drawing | Extending) -> None:
        error = self._drafter.in_step([drawing])[0].error
        if error is not None:
            raise error

    def _extend(self, rng: Rng, node: int, purpose: str, siblings: tuple[int, ...]) -> Extending:
        """Extend the chain by one token; False if it already ends with an end token."""
        drafted = self._ahead.token_ids
        if drafted and drafted[-1] in self._request.end_token_ids:
            return False
        with self._drafter.at_work():
            wanted = self._next or self._place.caught_up(drafted)
        if wanted is None:
            return False
        slot, tail = wanted
        logits = yield wanted
        with self._drafter.at_work():
            row = self._shaped(_kept(logits[-1, : self._request.num_tokens]), drafted)
            if self._request.shape is not None and bool(row.isneginf().all()):
                return False  # a grammar allows only tokens that this model's head does not cover
            new = self._drafted(row, drafted, rng, node, purpose, siblings)
            self._row = new.distribution.row if isinstance(new.distribution, Sampled) else row
            self._model.commit(slot, tail, range(len(tail)), new.token_id)
            if not drafted:
                slot.kv.mark()  # recurrent states can come back here when what is drawn now is rejected
        self._ahead.chain.append(new)
        self._next = slot, EMPTY_TREE
        return True

    def _shaped(self, row: Tensor, drafted: Sequence[int]) -> Tensor:
        shape = self._request.shape
        if shape is None:
            return row
        return shape((*self._context[len(self._request.prompt_ids) :], *drafted), row)

    def _drafted(
        self, row: Tensor, drafted: Sequence[int], rng: Rng, node: int, purpose: str, siblings: tuple[int, ...]
    ) -> DraftedToken:
        """The next token: chosen in the modes of `CHOSEN`, otherwise sampled."""
        if self._request.mode in CHOSEN:
            return DraftedToken(self._choose(row, self._output_length + len(drafted)), Fixed())
        new = sample_beside(probs_of(row, self._request.sampling), siblings, rng, node, purpose)
        if has_judge(self._request.mode) and isinstance(new.distribution, Sampled):
            return new._replace(distribution=replace(new.distribution, logits=row))
        return new

    def _choose(self, row: Tensor, position: int) -> int:
        """What the target would choose from the same row: the argmax, or the choice of the seed's noise."""
        sampling = self._request.sampling
        if sampling.greedy or sampling.seed is None:
            return largest_id(row)
        return coupled_choice(probs_of(row, sampling), sampling.seed, position)

    def _handed_on(self, drafted: DraftedToken) -> DraftedToken:
        distribution = drafted.distribution
        return (
            drafted._replace(distribution=self._drafter.handed_on(distribution))
            if isinstance(distribution, Sampled)
            else drafted
        )

    @property
    def _output_length(self) -> int:
        """Committed tokens of the answer."""
        return len(self._context) - len(self._request.prompt_ids)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Append the committed tokens; the next draw rewinds the KV cache to them and to samples that still hold."""
        self._context.extend(token_ids)
        self._ahead.settle(token_ids)
        self._next = None

    def end(self) -> None:
        """Release the request's KV cache and samples."""
        with self._drafter.at_work():
            self._place.leave()
        self._ahead, self._next, self._row, self._rows = Lookahead(), None, None, []


def _kept(row: Tensor) -> Tensor:
    """The row, copied if keeping it would keep the logits of many other rows alive."""
    return row.clone() if row.untyped_storage().nbytes() > 2 * row.nbytes else row
