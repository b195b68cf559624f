"""One request of a drafting service."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from precedent.drafters.base import DraftSession
from precedent.drafters.outcomes import outcomes
from precedent.drafters.request import Request
from precedent.drafters.sessions import Matching, end_all, match_budget
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import PLANNER, Planner
from precedent.planning.trust import Trust
from precedent.runtime.fence import Fault
from precedent.runtime.process import OfOneProcess
from precedent.tree import CandidateTree
from precedent_engines.checks import token_ids_of, whole_number

if TYPE_CHECKING:
    from precedent_engines.batch import Batch

ENDLESS = 2**31
"""Tokens that fit into a context whose length is not known."""


class OtherRequests(NamedTuple):
    """How many requests a step has, and the rows and expected tokens of those planned so far, without this one's."""

    requests: int
    rows: int
    tokens: float


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
        ended: Callable[[DraftingSession], None],
    ) -> None:
        self.request_id = request.request_id
        self._batch, self._request, self._drafting = batch, request, drafting
        self._room = ENDLESS if room is None else room
        self._pending: list[int] = []
        self._plan: Plan | None = None
        self._last: int | None = None
        self._trust = Trust()
        self._ended: Callable[[DraftingSession], None] | None = ended
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

        Of all paths through the drafters' candidates, it is the one with the most expected tokens per millisecond: the
        sum of its prefixes' probabilities, and one for the target's own token, over the time of a step of its width.
        Where width costs nothing, that is the path with the largest sum. Raises ConfigError for a negative number.
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
            self.settle(self._batch.planner, self._batch.accepted_by_source)
            self.over, drafting = True, self._drafting
            self._drafting, self._plan = {}, None
        end_all(drafting, self._batch.fences)
        ended(self)

    def settle(self, planner: Planner, accepted_by_source: Counter[str]) -> bool:
        """Learn from the tokens committed since the last plan, and pass them on; returns whether there were any."""
        if not self._pending or self.over:
            self._pending.clear()
            return False
        committed, self._pending = self._pending, []
        plan, self._plan = self._plan, None
        if plan is not None and plan.choice is not None:
            self._batch.planning(lambda: self._learn(plan, committed, planner, accepted_by_source), None)
        failed: dict[str, Exception] = {}
        for name, session in self._drafting.items():
            try:
                session.committed(committed)
            except Exception as error:
                failed[name] = error
        self._leave_out(failed)
        self._room -= len(committed)
        self.over = not self._request.end_token_ids.isdisjoint(committed)
        return True

    def _learn(self, plan: Plan, committed: Sequence[int], planner: Planner, accepted_by_source: Counter[str]) -> None:
        assert plan.choice is not None
        parents = plan.choice.parents
        verdict = outcomes(plan.choice.token_ids, parents, np.array(committed, dtype=np.int32))
        planner.learn(plan, parents, verdict)
        accepted = (verdict[:-1] > 0.0).nonzero()[0].tolist()
        if accepted:
            sources = planner.sources_of(plan)
            accepted_by_source.update(sources[node][0] for node in accepted)

    def matching(self, most: int) -> Matching:
        """What is asked of the drafters for the next step: nothing if the answer or the context has ended."""
        asked = self._drafting if most > 0 and self._room > 1 and not self.over else {}
        return Matching(asked, match_budget(most, self._last), self._request.num_tokens)

    def plan(self, planner: Planner, matched: Matching, most: int, others: OtherRequests, *, one_path: bool) -> Plan:
        """Plan the next step with what was matched; a drafter that failed is left out from then on."""
        self._leave_out(matched.failed)
        limits = Limits(
            max_nodes=most,
            max_draws=0,
            max_depth=self._room - 1,
            end_token_ids=self._request.end_token_ids,
            requests=others.requests,
            rows_beside=others.rows,
            tokens_beside=others.tokens,
            trust=self._trust,
            one_path=one_path,
        )
        self._plan = plan = self._batch.planning(lambda: _planned(planner, matched, limits), Plan())
        if matched.sessions:
            self._last = 0 if plan.choice is None else plan.choice.token_ids.size
        return plan

    def _leave_out(self, failed: Mapping[str, Exception]) -> None:
        for name, error in failed.items():
            self._batch.fences.of(name).fault(error)
            end_all({name: self._drafting.pop(name)}, self._batch.fences)


def _planned(planner: Planner, matched: Matching, limits: Limits) -> Plan:
    """The planner's choice among candidates. Raises Fault for an answer that cannot be used."""
    plan = planner.plan_fixed(matched.candidates, limits)
    if not isinstance(plan, Plan) or not math.isfinite(plan.expected_tokens):
        raise Fault(PLANNER, f"expected a plan with a finite number of tokens, got {type(plan).__name__}")
    if plan.choice is not None and not plan.choice.token_ids.size <= limits.max_nodes:
        raise Fault(PLANNER, f"planned {plan.choice.token_ids.size} nodes, of at most {limits.max_nodes}")
    return plan
