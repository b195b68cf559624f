"""PEARL (2408.11850): the draft model draws while the target scores, so that neither waits for the other.

While the target scores a tree, the draft model goes on behind its own part of it. What it draws serves twice:

* *pre-verify*: the first of these draws hangs below a node that is being scored, and the row after that node is all
  that its verdict needs. So it is judged in this step already, as a leaf whose own row nobody has computed;
* *post-verify*: if the text goes that way, the next tree begins with the draws behind it, at no time of its own.

A step with nothing at hand (the first one, and after a rejection) need not wait for a draft either: the target scores
what memory proposes, or its pending token alone, while the draft model draws; unless drawing is so cheap that waiting
for it brings more (`Planner`). Why the output law stays the target's is in docs/decisions/0017.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from precedent.background import Background
from precedent.drafters.base import DraftsAhead
from precedent.drafting import Draft
from precedent.errors import ConfigError, UnsupportedError
from precedent.failures import as_ours
from precedent.planner import Planner
from precedent.sampling import Coins
from precedent.sequence import DecodingSequence
from precedent.target import TargetModel


@dataclass(slots=True, eq=False)
class _Drawing:
    """One sequence's draft model at work beside a forward: at most `left` draws more."""

    sequence: DecodingSequence
    source: str
    drafting: DraftsAhead
    coins: Coins
    behind: int
    left: int
    made: int = 0
    seconds: float = 0.0

    def draw_one(self) -> None:
        """Draw one token; a failure is the sequence's, and ends the drawing."""
        started = perf_counter()
        try:
            drawn = self.drafting.draw_ahead(self.coins)
        except Exception as error:
            self.sequence.error, drawn = as_ours(error, "drafting ahead"), False
        self.left = self.left - 1 if drawn else 0
        self.made += drawn
        self.seconds += perf_counter() - started


class Pearl:
    """Draws ahead on a thread of its own, or on `executor`, which runs one thing at a time and ends with it.

    The draft model of every sequence is at rest again when `beside` is left, whatever happened meanwhile.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or Background(1, "precedent-draft")

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()

    @contextmanager
    def beside(self, drafts: Sequence[Draft], planner: Planner) -> Iterator[None]:
        """Let the draft models of these sequences draw until the body, the target's forward, has come to its end.

        How many draws that makes is a matter of time, never of a token that was drawn and not yet judged.
        """
        drawings = [drawing for draft in drafts for drawing in _drawings(draft, planner)]
        if not drawings:
            yield
            return
        enough = threading.Event()
        work = self._executor.submit(_draw_in_turns, drawings, enough)
        try:
            yield
        finally:
            enough.set()
            ended = perf_counter()
            work.result()
            _learn(drawings, (perf_counter() - ended) * 1e3, planner)


def pearl_for(draft: TargetModel | None, target: TargetModel, wanted: bool | None, *, early_exit: bool) -> Pearl | None:
    """What draws ahead in an engine; where nobody said (None), only a draft model on another device does.

    Raises ConfigError without a draft model, UnsupportedError for one that reads the target's own keys and values.
    """
    if wanted and draft is None:
        raise ConfigError("pearl=True lets a draft model draw while the target scores: give draft_model= as well")
    if wanted and early_exit:
        raise UnsupportedError(
            "pearl=True cannot be had with an early exit (first-layers:N), which reads the keys and values that the "
            "target is writing: give a draft model with its own, or leave pearl out"
        )
    if draft is None or early_exit or wanted is False:
        return None
    return Pearl() if wanted or draft.device != target.device else None


def _drawings(draft: Draft, planner: Planner) -> Iterator[_Drawing]:
    """What a sequence's drafters that draft ahead may draw beside the forward over its tree."""
    sequence = draft.sequence
    for source, drafting in sequence.drafting_ahead.items():
        behind = drafting.behind
        most = planner.num_draws_ahead(source, behind, sequence.limits) - drafting.at_hand
        room = sequence.limits.max_depth + 1 - draft.plan.draws.get(source, 0) - drafting.at_hand
        if min(most, room) > 0:
            yield _Drawing(sequence, source, drafting, sequence.coins(), behind, min(most, room))


def _learn(drawings: Sequence[_Drawing], waited: float, planner: Planner) -> None:
    """Tell the planner what the draws took, and for how many milliseconds the step waited for the last of them."""
    for drawing in drawings:
        drawing.sequence.stats.draft_model_seconds += drawing.seconds
        if drawing.made:
            planner.observe_draws(drawing.source, drawing.made, drawing.behind, drawing.seconds * 1e3)
    for source in {drawing.source for drawing in drawings}:
        behind = max(drawing.behind for drawing in drawings if drawing.source == source)
        planner.observe_draws_ahead(source, behind, waited)


def _draw_in_turns(drawings: Sequence[_Drawing], enough: threading.Event) -> None:
    """A token for each in turn, those with the fewest first, until it is enough or nothing may follow."""
    order = sorted(drawings, key=lambda drawing: drawing.drafting.at_hand)
    while any(drawing.left for drawing in order):
        for drawing in order:
            if enough.is_set():
                return
            if drawing.left:
                drawing.draw_one()


def wait_for(scored: Sequence[Tensor]) -> None:
    """Wait until these rows are computed: a GPU is still at work when its forward has returned."""
    for device in {rows.device for rows in scored if rows.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
