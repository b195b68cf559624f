"""PEARL (2408.11850): the draft model draws while the target model scores, so that neither waits for the other.

While the target model scores a tree, the draft model continues its own chain beyond it. Its samples are used twice:

* *pre-verify*: the first of them hangs below a node that is being scored, and its verification needs only the row after
  that node. So this step verifies it already, as a leaf without a row of its own;
* *post-verify*: if that sample is accepted, the next tree starts with the samples after it, which cost no extra time.

A step without samples at hand (the first one, and after a rejection) does not wait for a draft either: the target model
scores the fixed candidates, or its pending token alone, while the draft model draws. The exception is drawing so cheap
that waiting for it pays off (`planning.pearl`). docs/decisions/0017 shows why the output distribution stays the
target's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from precedent.config import is_lossy
from precedent.decoding.aids import BESIDE, Aids
from precedent.decoding.beside import Beside
from precedent.decoding.proposal import Proposal
from precedent.decoding.sequence import DecodingSequence
from precedent.decoding.verification import Verified
from precedent.drafters.base import DrawSession
from precedent.drafters.model.lookahead import DrawsAhead
from precedent.errors import ConfigError, UnsupportedError
from precedent.planning.pearl import PearlPlanner
from precedent.runtime.background import Background
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.tree import CandidateTree

LEAST_PATIENCE, PATIENCE = 2.0, 20.0
"""A step waits for a draft model that is still drawing so many seconds, or so many times the target's forward."""


@dataclass(slots=True, eq=False)
class _Drawing:
    """One sequence's draft model, drawing during a forward: at most `left` more samples."""

    sequence: DecodingSequence
    source: str
    session: DrawsAhead
    rng: Rng
    behind: int
    left: int
    made: int = 0
    seconds: float = 0.0
    error: Exception | None = None

    def draw_one(self) -> None:
        """Sample one token; a failure ends its drawing."""
        started = perf_counter()
        try:
            drawn = self.session.draw_ahead(self.rng)
        except Exception as error:
            self.error, drawn = error, False
        self.left = self.left - 1 if drawn else 0
        self.made += drawn
        self.seconds += perf_counter() - started


class Pearl(Beside):
    """Draws ahead on a thread of its own, or on `executor`, which must run one job at a time; `close` shuts it down.

    Every sequence's draft model is idle again when `forward` exits, even after an error. A draft model that does not
    come back is abandoned, and its drafter stays switched off until it does.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or Background(1, "precedent-draft")
        self._work: Future[None] | None = None

    def close(self) -> None:
        """End the thread, once it is idle."""
        self._executor.shutdown(wait=self._work is None or self._work.done())

    def at_hand(self, session: DrawSession) -> int | None:
        """Number of samples that a session drew during the last forward; None for a session that draws on request."""
        return session.at_hand if isinstance(session, DrawsAhead) else None

    @contextmanager
    def forward(self, proposals: Sequence[Proposal], aids: Aids) -> Iterator[None]:
        """Let the draft models of these sequences draw until the body, the target's forward, ends.

        How many samples they make depends on time alone, never on a token that was sampled but not yet verified.
        """
        asked = proposals if aids.fences.of(BESIDE).is_on else ()
        drawings = [drawing for each in asked for drawing in _drawings(each, aids)]
        if not drawings:
            yield
            return
        enough, started = threading.Event(), perf_counter()
        self._work = work = self._executor.submit(_draw_in_turns, drawings, enough)
        try:
            yield
        finally:
            enough.set()
            ended = perf_counter()
            patience = min(aids.fences.deadline, max(LEAST_PATIENCE, PATIENCE * (ended - started)))
            if wait([work], timeout=patience).done:
                _learn(drawings, (perf_counter() - ended) * 1e3, aids)
            else:
                _abandon(drawings, work, aids)

    def wait_for(self, scored: Sequence[Tensor]) -> None:
        """Wait until these rows are computed: a GPU is still busy when its forward has returned."""
        for device in {rows.device for rows in scored if rows.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def late(self, proposal: Proposal, aids: Aids) -> CandidateTree:
        """The scored tree, extended by the samples drawn meanwhile as leaves without rows of their own.

        A lossy mode changes the target's distribution depending on the proposals, so it verifies only the scored tree.
        """
        tree, sequence = proposal.tree, proposal.sequence
        sequence.stats.num_lookaheads += _num_at_hand(sequence) > 0
        for name, session in [] if is_lossy(sequence.request.mode) else list(_ahead_of(sequence)):
            if session.at_hand:
                tree = aids.drafting(sequence, name, partial(session.extended, tree), tree)
        return tree

    def settled(self, verified: Verified, token_ids: Sequence[int]) -> None:
        """Count the step if samples are still at hand, that is, if the committed text agrees with them."""
        sequence = verified.sequence
        sequence.stats.num_lookaheads_used += _num_at_hand(sequence) > 0


def pearl_for(draft: TargetModel | None, target: TargetModel, wanted: bool | None, *, early_exit: bool) -> Pearl | None:
    """An engine's `Pearl`, or None; by default (`wanted` None) only a draft model on another device draws ahead.

    If `wanted`, raises ConfigError without a draft model, and UnsupportedError for an early exit, which reads the
    target's own keys and values.
    """
    if wanted and draft is None:
        raise ConfigError("pearl=True lets a draft model draw while the target scores: give draft_model= too")
    if wanted and early_exit:
        raise UnsupportedError(
            "pearl=True does not work with an early exit (first-layers:N), which reads the keys and values that the "
            "target is writing: give a separate draft model, or leave pearl out"
        )
    if draft is None or early_exit or wanted is False:
        return None
    return Pearl() if wanted or draft.device != target.device else None


def _ahead_of(sequence: DecodingSequence) -> Iterator[tuple[str, DrawsAhead]]:
    for source, session in sequence.drawing.items():
        if isinstance(session, DrawsAhead):
            yield source, session


def _num_at_hand(sequence: DecodingSequence) -> int:
    return sum(session.at_hand for _, session in _ahead_of(sequence))


def _drawings(proposal: Proposal, aids: Aids) -> list[_Drawing]:
    """What a sequence's drafters may draw ahead, during the forward over its tree."""
    sequence = proposal.sequence
    if sequence.error is not None:
        return []
    drawings = (
        aids.drafting(sequence, source, partial(_drawing, proposal, source, session, aids), None)
        for source, session in list(_ahead_of(sequence))
        if source not in sequence.exhausted
    )
    return [drawing for drawing in drawings if drawing is not None]


def _drawing(proposal: Proposal, source: str, session: DrawsAhead, aids: Aids) -> _Drawing | None:
    sequence, planner = proposal.sequence, aids.planner
    assert isinstance(planner, PearlPlanner)
    behind, limits = session.behind, sequence.limits()
    decided = aids.planning(sequence, partial(planner.num_draws_ahead, source, behind, limits), 0)
    room = limits.max_depth + 1 - proposal.plan.draws.get(source, 0)
    number = min(decided, room) - session.at_hand
    return _Drawing(sequence, source, session, sequence.rng(), behind, number) if number > 0 else None


def _learn(drawings: Sequence[_Drawing], waited: float, aids: Aids) -> None:
    """Tell the planner what the draws cost, and for how many milliseconds the step `waited` for the last of them.

    A session that failed draws nothing more, but what it has drawn is verified: whether it failed may depend on it.
    """
    planner = aids.planner
    assert isinstance(planner, PearlPlanner)
    for drawing in drawings:
        sequence = drawing.sequence
        sequence.stats.draft_model_seconds += drawing.seconds
        if drawing.error is not None:
            aids.fences.of(drawing.source).fault(drawing.error)
            sequence.exhausted.add(drawing.source)
        if drawing.made:
            observe = partial(planner.observe_draws, drawing.source, drawing.made, drawing.behind)
            aids.planning(sequence, partial(observe, drawing.seconds * 1e3), None)
    for source, last in {drawing.source: drawing for drawing in drawings}.items():
        behind = max(drawing.behind for drawing in drawings if drawing.source == source)
        aids.planning(last.sequence, partial(planner.observe_wait, source, behind, waited), None)


def _abandon(drawings: Sequence[_Drawing], work: Future[None], aids: Aids) -> None:
    """Go on without draft models that do not come back; their sessions are still in use and are not touched again."""
    for drawing in drawings:
        drawing.sequence.sessions.pop(drawing.source, None)
    for source in {drawing.source for drawing in drawings}:
        aids.fences.of(source).hangs(work)


def _draw_in_turns(drawings: Sequence[_Drawing], enough: threading.Event) -> None:
    """Draw one token for each in turn, those with the fewest samples first, until `enough` is set or all are done."""
    order = sorted(drawings, key=lambda drawing: drawing.session.at_hand)
    while any(drawing.left for drawing in order):
        for drawing in order:
            if enough.is_set():
                return
            if drawing.left:
                drawing.draw_one()
