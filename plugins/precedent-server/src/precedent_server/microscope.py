"""Keeps the last steps of a decode loop for inspection: candidate trees and what became of them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from precedent.decoding.verification import Verified
from precedent.pages.tree_picture import CONTEXT_TOKENS, SeenTree


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One sequence's part of a step: its tree, and the target's own token after the accepted path.

    `expected_tokens` is how many tokens the planner expected of the fixed candidates and the target's own token.
    """

    number: int
    seen: SeenTree
    next_token: int
    expected_tokens: float


class Microscope:
    """An observer (`Engine.watch_steps`) that keeps the last steps with candidates. Any thread may read it."""

    def __init__(self, num_steps: int) -> None:
        self._lock, self._number = threading.Lock(), 0
        self._steps = deque[SeenStep](maxlen=num_steps)

    def steps(self) -> list[SeenStep]:
        """The last steps, newest first."""
        with self._lock:
            return list(reversed(self._steps))

    def __call__(self, verified: Verified, token_ids: tuple[int, ...]) -> None:
        """Keep the step if anything was proposed."""
        if not len(verified.rows.tree):
            return
        sequence, plan = verified.sequence, verified.proposal.plan
        output = sequence.output_ids[: len(sequence.output_ids) - len(token_ids)][-CONTEXT_TOKENS:]
        before = (*sequence.request.prompt_ids[-CONTEXT_TOKENS:], *output)[-CONTEXT_TOKENS:]
        seen = SeenTree(verified.rows.tree, verified.accepted, before, tuple(plan.estimates.tolist()))
        with self._lock:
            self._number += 1
            self._steps.append(SeenStep(self._number, seen, verified.verdict.next_token, plan.expected_tokens))
