"""The requests of a drafting service: a session for each, and the batch in which they are drafted for together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import RLock
from time import perf_counter

import numpy as np

from precedent.drafters import Drafter, DraftSession, DrawSession
from precedent.drafters.outcomes import outcomes
from precedent.drafters.request import Request
from precedent.drafters.sessions import Matching, begin_all, end_all, match_budget, match_together
from precedent.errors import UnsupportedError
from precedent.planning.calibration import Trust
from precedent.planning.costs import STEP_COSTS, StepCosts
from precedent.planning.planner import PLANNER, Limits, Plan, Planner
from precedent.runtime.fence import Fault, Fences, Result
from precedent.runtime.process import OfOneProcess
from precedent.tree import CandidateTree, TreeBuilder
from precedent_engines.requests import token_ids_of, whole_number

ENDLESS = 2**31
"""Tokens that fit into a context whose length is not known."""

Clock = Callable[[], float]
"""Seconds since some moment."""

SHARES = (1.0, 0.0, 0.25) * 4
"""Shares of the longest draft in the first steps, while no cost is known: a width must be used to be measured."""


class StepClock:
    """Times the other engine's steps: from the end of one call for drafts to the beginning of the next.

    Only a step in which nothing else was done counts: the tokens of the last call were committed, and no request began.
    """

    def __init__(self, planner: Planner, now: Clock = perf_counter) -> None:
        self._planner, self._now = planner, now
        self._width, self._since = 0, 0.0
        cost = planner.cost
        self._unknown = cost if isinstance(cost, StepCosts) and not cost.known else None
        self._best: dict[int, float] = {}
        self._tried = 0

    def most(self, wanted: int) -> int:
        """The longest draft in the coming step, if `wanted` are."""
        return wanted if self._unknown is None else int(wanted * SHARES[self._tried])

    def began(self) -> None:
        """A request began, so the present step also computes its prompt."""
        self._width = 0

    def called(self, stepped: bool) -> None:
        """The next call begins; `stepped` says whether tokens were committed since the last one."""
        if not self._width or not stepped:
            return
        width, milliseconds = self._width, (self._now() - self._since) * 1e3
        if self._unknown is None:
            self._planner.observe_forward(width, milliseconds)
            return
        self._tried += 1
        self._best[width] = min(milliseconds, self._best.get(width, milliseconds))
        if self._tried == len(SHARES):
            self._unknown.begin(self._best)
            self._unknown = None

    def returned(self, width: int) -> None:
        """A call ends; the step that follows computes `width` tokens of all requests together."""
        self._width, self._since = width, self._now()


class Batch:
    """The planner, what it learns, and the counts that all sessions share; one thread at a time drafts."""

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
        stepped = [session.settle() for session in sessions]
        self.fences.of(STEP_COSTS).run(lambda: self.clock.called(any(stepped)), None)
        most = self.clock.most(most)
        matched = [session.matching(most, one_path) for session in sessions]
        match_together(matched)
        running = sum(not session.over for session in sessions)
        rows, tokens, plans = running, float(running), list[Plan]()
        for session, found in zip(sessions, matched, strict=True):
            limits = Limits(
                max_nodes=most,
                max_draws=0,
                max_depth=session.room - 1,
                end_token_ids=session.end_token_ids,
                requests=running,
                rows_beside=max(0, rows - 1),
                tokens_beside=max(0.0, tokens - 1.0),
                trust=session.trust,
                one_path=one_path,
                tenant=session.tenant,
            )
            plan = session.plan(found, limits)
            count = len(_tokens(plan))
            rows, tokens = rows + count, tokens + plan.expected_tokens - 1.0
            self.num_drafts, self.num_draft_tokens = self.num_drafts + bool(count), self.num_draft_tokens + count
            plans.append(plan)
        self.clock.returned(rows)
        return plans


class DraftingSession(OfOneProcess):
    """Drafts for one request of another engine, until `end`; made by `DraftingService.begin`.

    Call `committed` after every step of that engine, then `chain` or `tree` for the next one. A service's sessions may
    be used on several threads, one session on one thread at a time.
    """

    instead = "begin the request in the process that drafts for it"

    def __init__(
        self,
        batch: Batch,
        request: Request,
        drafting: dict[str, DraftSession],
        room: int | None,
        ended: Callable[[str], object],
    ) -> None:
        self._batch, self._request, self._drafting = batch, request, drafting
        self.end_token_ids, self.tenant, self.trust = request.end_token_ids, request.tenant, Trust()
        self.room = ENDLESS if room is None else room
        self._pending: list[int] = []
        self._plan: Plan | None = None
        self._last: int | None = None
        self._ended: Callable[[str], object] | None = ended
        self.over = False
        """True once the answer has ended, or the session: nothing more is drafted."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """Report the tokens that the target committed since the last call: accepted ones and its own.

        The first tokens are compared with the last chain or tree: that is how acceptance is learned, so report what the
        target chose even if it never saw the draft. Raises PromptError for what is not a token id, and then nothing is
        taken over.
        """
        self.check_process()
        self._pending += token_ids_of(token_ids, "the committed tokens")

    def chain(self, max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens to verify after the committed ones; `[]` if none pay off.

        It follows the likeliest of the drafters' candidates at each place, and ends where it has the most expected
        tokens per millisecond: the sum of its prefixes' probabilities, and one for the target's own token, over the
        time of a step of its width. Raises ConfigError for a negative number.
        """
        self.check_process()
        return self._batch.chains([self], whole_number(max_tokens, "max_tokens"))[0]

    def tree(self, max_nodes: int) -> CandidateTree:
        """The same as a tree of at most `max_nodes` fixed candidates, for an engine that verifies trees."""
        self.check_process()
        return self._batch.tree(self, whole_number(max_nodes, "max_nodes"))

    def end(self) -> None:
        """Release everything; the session drafts nothing afterwards. May be called again."""
        ended, self._ended = self._ended, None
        if ended is None or not self.is_here:
            return
        with self._batch.lock:  # another thread may be drafting for a batch with this session
            self.settle()
            self.over, drafting = True, self._drafting
            self._drafting, self._plan = {}, None
        end_all(drafting, self._batch.fences)
        ended(self._request.request_id)

    def settle(self) -> bool:
        """Learn from the tokens committed since the last plan, and pass them on; returns whether there were any."""
        committed, self._pending = self._pending, []
        if not committed or self.over:
            return False
        plan, self._plan = self._plan, None
        if plan is not None and plan.choice is not None:
            self._batch.planning(lambda: self._learn(plan, committed), None)
        failed: dict[str, Exception] = {}
        for name, session in self._drafting.items():
            try:
                session.committed(committed)
            except Exception as error:
                failed[name] = error
        self._leave_out(failed)
        self.room -= len(committed)
        self.over = not self.end_token_ids.isdisjoint(committed)
        return True

    def matching(self, most: int, one_path: bool) -> Matching:
        """What is asked of the drafters for the next step: nothing if the answer or the context has ended."""
        asked = self._drafting if most > 0 and self.room > 1 and not self.over else {}
        return Matching(asked, match_budget(most, self._last, one_path), self._request.num_tokens)

    def plan(self, matched: Matching, limits: Limits) -> Plan:
        """Plan the next step with what was matched; a drafter that failed is left out from then on."""
        self._leave_out(matched.failed)
        planner = self._batch.planner
        self._plan = plan = self._batch.planning(lambda: _planned(planner, matched, limits), Plan())
        if matched.sessions:
            self._last = len(_tokens(plan))
        return plan

    def _learn(self, plan: Plan, committed: Sequence[int]) -> None:
        assert plan.choice is not None
        planner, parents = self._batch.planner, plan.choice.parents
        verdict = outcomes(plan.choice.token_ids, parents, np.array(committed, dtype=np.int32))
        planner.learn(plan, parents, verdict)
        accepted = (verdict[:-1] > 0.0).nonzero()[0].tolist()
        if accepted:
            sources = planner.sources_of(plan)
            self._batch.accepted_by_source.update(sources[node][0] for node in accepted)

    def _leave_out(self, failed: Mapping[str, Exception]) -> None:
        for name, error in failed.items():
            self._batch.fences.of(name).fault(error)
            end_all({name: self._drafting.pop(name)}, self._batch.fences)


def _tokens(plan: Plan) -> list[int]:
    found: list[int] = [] if plan.choice is None else plan.choice.token_ids.tolist()
    return found


def _planned(planner: Planner, matched: Matching, limits: Limits) -> Plan:
    """The planner's choice among candidates. Raises Fault for an answer that cannot be used."""
    plan = planner.plan_fixed(matched.candidates, limits)
    if not isinstance(plan, Plan) or not math.isfinite(plan.expected_tokens):
        raise Fault(PLANNER, f"expected a plan with a finite number of tokens, got {type(plan).__name__}")
    if plan.choice is not None and not plan.choice.token_ids.size <= limits.max_nodes:
        raise Fault(PLANNER, f"planned {plan.choice.token_ids.size} nodes, of at most {limits.max_nodes}")
    return plan
