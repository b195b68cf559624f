"""The last steps of an engine, kept for somebody who looks at them: candidate trees and what became of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from precedent.decoding.beside import Beside
from precedent.drafters.base import DrawSession
from precedent.tree import CandidateTree

if TYPE_CHECKING:
    from precedent.decoding.aids import Aids
    from precedent.decoding.proposal import Proposal
    from precedent.decoding.verification import Verified

CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One sequence's part of a step: its tree, the accepted path, and the target's own token after it.

    `before` are the last committed tokens above the tree. `estimates` `[num_fixed]` are the probabilities for which the
    planner chose the fixed candidates, which come first in the tree: that a node is accepted once its parent is.
    `expected_tokens` is how many tokens it expected of the fixed candidates and the target's own token.
    """

    number: int
    tree: CandidateTree
    path: tuple[int, ...]
    next_token: int
    before: tuple[int, ...]
    estimates: tuple[float, ...]
    expected_tokens: float


class Microscope(Beside):
    """Keeps the last steps while it passes everything on to another `Beside`. Any thread may read it."""

    def __init__(self, beside: Beside, num_steps: int) -> None:
        self._beside, self._lock = beside, threading.Lock()
        self._steps = deque[SeenStep](maxlen=num_steps)
        self._number = 0

    def steps(self) -> list[SeenStep]:
        """The last steps with candidates, newest first."""
        with self._lock:
            return list(reversed(self._steps))

    def at_hand(self, session: DrawSession) -> int | None:
        """As without a microscope."""
        return self._beside.at_hand(session)

    def forward(self, proposals: Sequence[Proposal], aids: Aids) -> AbstractContextManager[None]:
        """As without a microscope."""
        return self._beside.forward(proposals, aids)

    def wait_for(self, scored: Sequence[Tensor]) -> None:
        """As without a microscope."""
        self._beside.wait_for(scored)

    def late(self, proposal: Proposal, aids: Aids) -> CandidateTree:
        """As without a microscope."""
        return self._beside.late(proposal, aids)

    def settled(self, verified: Verified, token_ids: Sequence[int]) -> None:
        """Keep the step if anything was proposed."""
        self._beside.settled(verified, token_ids)
        if len(verified.tree):
            with self._lock:
                self._number += 1
                self._steps.append(_seen(self._number, verified, len(token_ids)))


def _seen(number: int, verified: Verified, num_tokens: int) -> SeenStep:
    sequence, verdict, plan = verified.sequence, verified.verdict, verified.proposal.plan
    output = sequence.output_ids[: len(sequence.output_ids) - num_tokens][-CONTEXT_TOKENS:]
    before = (*sequence.request.prompt_ids[-CONTEXT_TOKENS:], *output)[-CONTEXT_TOKENS:]
    return SeenStep(
        number=number,
        tree=verified.tree,
        path=verdict.accepted,
        next_token=verdict.next_token,
        before=before,
        estimates=tuple(plan.estimates.tolist()),
        expected_tokens=plan.expected_tokens,
    )
