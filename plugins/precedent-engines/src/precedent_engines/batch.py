"""Drafts for the requests of a batch together: what all sessions of a service share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import RLock
from time import perf_counter

from precedent.drafters import Drafter, DraftSession, DrawSession, Request
from precedent.drafters.sessions import begin_all, end_all, match_together
from precedent.errors import UnsupportedError
from precedent.planning.costs import STEP_COSTS
from precedent.planning.plan import Plan
from precedent.planning.planner import PLANNER, Planner
from precedent.runtime.fence import Fault, Fences, Result
from precedent.tree import CandidateTree, TreeBuilder
from precedent_engines.clock import Clock, StepClock
from precedent_engines.session import DraftingSession, OtherRequests


class Batch:
    """The planner, what it learns, and the counts; one thread at a time drafts."""

    def __init__(self, planner: Planner, clock: Clock = perf_counter) -> None:
        self.planner, self.clock, self.lock = planner, StepClock(planner, clock), RLock()
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted_by_source, self.fences = Counter[str](), Fences()

    def begin(self, drafters: Mapping[str, Drafter], request: Request) -> dict[str, DraftSession]:
        """A session of every drafter; one that fails to begin, or is switched off, is left out.

        Raises UnsupportedError for a drafter that samples from a model.
        """
        begun = begin_all(drafters, request, self.fences)
        sampling = [name for name, session in begun.items() if isinstance(session, DrawSession)]
        if sampling:
            end_all(begun, self.fences)
            raise UnsupportedError(f"the drafter {sampling[0]!r} samples from a model, which a service does not do")
        with self.lock:
            self.clock.began()
        return begun

    def chains(self, sessions: Sequence[DraftingSession], max_tokens: int) -> list[list[int]]:
        """One chain per session, in this order."""
        with self.lock:
            return [_tokens(plan) for plan in self._plans(sessions, max_tokens, one_path=True)]

    def tree(self, session: DraftingSession, max_nodes: int) -> CandidateTree:
        """One session's tree of fixed candidates."""
        with self.lock:
            (plan,) = self._plans([session], max_nodes, one_path=False)
            return self.planning(lambda: self._tree(plan), TreeBuilder()).build()

    def planning(self, act: Callable[[], Result], otherwise: Result) -> Result:
        """What the planner answers; after a fault, `otherwise`. What it learned is dropped once it is switched off."""
        if not (self.fences.of(PLANNER).is_on and self.fences.of(STEP_COSTS).is_on):
            return otherwise
        try:
            return act()
        except Exception as error:
            fence = self.fences.of(error.aid if isinstance(error, Fault) else PLANNER)
            fence.fault(error)
            if not fence.is_on:
                with suppress(Exception):
                    self.planner.forget()
            return otherwise

    def _tree(self, plan: Plan) -> TreeBuilder:
        builder = TreeBuilder()
        if plan.choice is not None:
            builder.add_fixed_tree(_tokens(plan), plan.choice.parents.tolist(), self.planner.sources_of(plan))
        return builder

    def _plans(self, sessions: Sequence[DraftingSession], most: int, *, one_path: bool) -> list[Plan]:
        """Plan for each session, given the rows and expected tokens of the others planned so far."""
        stepped = [session.settle(self.planner, self.accepted_by_source) for session in sessions]
        self.fences.of(STEP_COSTS).run(lambda: self.clock.called(any(stepped)), None)
        most = self.clock.most(most)
        running = sum(not session.over for session in sessions)
        matched = [session.matching(most) for session in sessions]
        match_together(matched)
        rows, tokens, plans = running, float(running), list[Plan]()
        for session, found in zip(sessions, matched, strict=True):
            others = OtherRequests(running, max(0, rows - 1), max(0.0, tokens - 1.0))
            plan = session.plan(self.planner, found, most, others, one_path=one_path)
            count = 0 if plan.choice is None else plan.choice.token_ids.size
            rows, tokens = rows + count, tokens + plan.expected_tokens - 1.0
            self.num_drafts, self.num_draft_tokens = self.num_drafts + bool(count), self.num_draft_tokens + count
            plans.append(plan)
        self.clock.returned(rows)
        return plans


def _tokens(plan: Plan) -> list[int]:
    found: list[int] = [] if plan.choice is None else plan.choice.token_ids.tolist()
    return found
