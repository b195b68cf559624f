"""The contenders of a replay: their common interface, and Precedent's own drafters with its planner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter, DraftSession
from precedent.drafters.request import Request
from precedent.planning.calibration import Trust
from precedent.planning.planner import Limits, Plan, Planner
from precedent.runtime.compiled import Floats
from precedent.tree import ROOT, CandidateTree
from precedent_replay.turns import Turn


class Reliability:
    """Predicted against observed acceptance: of the candidates predicted at 0.3, 30 % should be accepted."""

    def __init__(self, num_bins: int = 10) -> None:
        self._predicted, self._observed, self._seen = np.zeros(num_bins), np.zeros(num_bins), np.zeros(num_bins)
        self._squares = 0.0

    def observe(self, predicted: Floats, accepted: Floats) -> None:
        """Count predictions in (0, 1], `[n]`, and their outcomes, 0 or 1, `[n]`."""
        numbers = np.minimum((predicted * self._seen.size).astype(np.int64), self._seen.size - 1)
        np.add.at(self._predicted, numbers, predicted)
        np.add.at(self._observed, numbers, accepted)
        np.add.at(self._seen, numbers, 1.0)
        self._squares += float(((predicted - accepted) ** 2).sum())

    def as_dict(self) -> dict[str, object]:
        """The Brier score (mean squared error, 0 is perfect) and the reliability curve."""
        total = self._seen.sum()
        bins = [
            {
                "predicted": round(self._predicted[i] / seen, 4),
                "observed": round(self._observed[i] / seen, 4),
                "candidates": int(seen),
            }
            for i, seen in enumerate(self._seen)
            if seen
        ]
        return {"brier_score": round(self._squares / total, 5) if total else 0.0, "bins": bins}


class Contender:
    """Proposes a tree of fixed candidates before every step of a turn."""

    name: str

    def begin(self, turn: Turn) -> None:
        """Begin a turn; its answer must not be looked at."""

    def propose(self) -> CandidateTree:
        """Propose candidates for the next step."""
        raise NotImplementedError

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take note of the tree's accepted path, and of the tokens committed (path and target's own)."""

    def end(self) -> None:
        """End the turn."""


class Drafted(Contender):
    """Precedent's drafters and planner."""

    def __init__(self, name: str, drafters: Sequence[Drafter], planner: Planner, budget: int, end_id: int) -> None:
        self.name = name
        self._drafters, self.planner, self._budget = drafters, planner, budget
        self._end_ids = frozenset({end_id})
        self.reliability = Reliability()
        self._steps: list[tuple[Floats, CandidateTree, Sequence[int]]] = []
        self._sessions: list[DraftSession] = []
        self._plan, self._tree, self._trust = Plan(), CandidateTree(), Trust()

    @property
    def estimates(self) -> Floats:
        """The planner's acceptance estimates for the last tree's nodes, given accepted parents, `[num_nodes]`."""
        return self._plan.estimates

    def begin(self, turn: Turn) -> None:
        """Begin a turn."""
        self._trust = Trust()
        request = Request(
            self.name,
            turn.prompt_ids,
            SamplingParams(),
            query=turn.query,
            tools=turn.tools_fingerprint,
            end_token_ids=self._end_ids,
        )
        self._sessions = [drafter.begin(request) for drafter in self._drafters]

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        candidates = [session.match(self._budget) for session in self._sessions]
        limits = Limits(self._budget, 0, self._budget, self._end_ids, trust=self._trust)
        self._plan = self.planner.plan(candidates, {}, limits)
        self._tree = self._plan.builder.build()
        return self._tree

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Learn what was committed."""
        self._steps.append((self._plan.estimates, self._tree, path))
        self.planner.observe(self._plan, self._tree, path)
        for session in self._sessions:
            session.committed(token_ids)

    def end(self) -> None:
        """End all drafters and compare estimates with outcomes; that waits until now because steps are timed."""
        for session in self._sessions:
            session.end()
        for estimates, tree, path in self._steps:
            self._compare(estimates, tree, path)
        self._steps.clear()

    def _compare(self, estimates: Floats, tree: CandidateTree, path: Sequence[int]) -> None:
        """Compare the estimates of all children of accepted nodes with their outcomes."""
        right = {ROOT, *path}
        tried = [node for node, parent in enumerate(tree.parents) if parent in right]
        outcome = np.array([node in right for node in tried], dtype=np.float64)
        self.reliability.observe(estimates[tried], outcome)
