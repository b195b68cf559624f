"""Who drafts in a replay: Precedent's own drafters under its planner, behind the interface that baselines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter, DraftSession
from precedent.drafters.request import Request
from precedent.planning.calibration import Reliability
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import Planner
from precedent.planning.trust import Trust
from precedent.replay.turns import Turn
from precedent.runtime.compiled import Floats
from precedent.tree import ROOT, CandidateTree


class Contender(Protocol):
    """Proposes a tree of points before every step of a turn."""

    name: str

    def begin(self, turn: Turn) -> None:
        """A new turn; nothing of its answer is known."""

    def propose(self) -> CandidateTree:
        """Candidates for the next step."""

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """The tree's accepted path, and the tokens it and the target brought."""

    def end(self) -> None:
        """The turn is over."""


class Drafted:
    """Precedent's drafters and planner."""

    def __init__(self, name: str, drafters: Sequence[Drafter], planner: Planner, budget: int, end_id: int) -> None:
        self.name = name
        self._drafters, self.planner, self._budget = drafters, planner, budget
        self._end_ids = frozenset({end_id})
        self.reliability = Reliability()
        self._unjudged: list[tuple[Floats, CandidateTree, Sequence[int]]] = []
        self._draftings: list[DraftSession] = []
        self._plan, self._tree, self._trust = Plan(), CandidateTree(), Trust()

    @property
    def estimates(self) -> Floats:
        """What the planner expected of the last tree's nodes once their parents are accepted, `[num_nodes]`."""
        return self._plan.estimates

    def begin(self, turn: Turn) -> None:
        """Begin all drafters."""
        self._trust = Trust()
        request = Request(
            self.name,
            turn.prompt_ids,
            SamplingParams(),
            query=turn.query,
            tools=turn.tools_fingerprint,
            end_token_ids=self._end_ids,
        )
        self._draftings = [drafter.begin(request) for drafter in self._drafters]

    def propose(self) -> CandidateTree:
        """Match and plan."""
        candidates = [session.match(self._budget) for session in self._draftings]
        limits = Limits(self._budget, 0, self._budget, self._end_ids, trust=self._trust)
        self._plan = self.planner.plan(candidates, {}, limits)
        self._tree = self._plan.builder.build()
        return self._tree

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let planner and drafters learn."""
        self._unjudged.append((self._plan.estimates, self._tree, path))
        self.planner.observe(self._plan, self._tree, path)
        for session in self._draftings:
            session.committed(token_ids)

    def end(self) -> None:
        """End all drafters; what was expected is compared with what came of it only now, for a step is timed."""
        for session in self._draftings:
            session.end()
        for estimates, tree, path in self._unjudged:
            self._judge(estimates, tree, path)
        self._unjudged.clear()

    def _judge(self, estimates: Floats, tree: CandidateTree, path: Sequence[int]) -> None:
        """Compare the estimates of all children of accepted nodes with what became of them."""
        right = {ROOT, *path}
        tried = [node for node, parent in enumerate(tree.parents) if parent in right]
        outcome = np.array([node in right for node in tried], dtype=np.float64)
        self.reliability.observe(estimates[tried], outcome)
