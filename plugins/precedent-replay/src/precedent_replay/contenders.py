"""Who takes part in a replay: baselines, Precedent's drafters alone and together, and these with one idea left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from precedent.config import SamplingParams
from precedent.drafters import Candidates, Drafter, DrafterParts, DraftSession, Request, load_drafters
from precedent.drafters.base import DrawSource
from precedent.drafters.matching.alignment import Trail
from precedent.drafters.recall.drafter import RecallDrafter, RecallSession
from precedent.drafters.sessions import match_budget
from precedent.planning import Limits, Plan, Planner
from precedent.planning.calibration import Calibration, Trust
from precedent.planning.choose import Choice
from precedent.planning.costs import CostCurve
from precedent.runtime.background import AtOnce
from precedent.runtime.compiled import Floats, Int32s
from precedent.tree import ROOT, CandidateTree
from precedent_replay.baselines import AdaPLD, Contender, PromptLookup, SglangNgram, SuffixDecoding, SuffixTree
from precedent_replay.pool import Pool
from precedent_replay.settings import FURTHER_BASELINES, Settings
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


class Drafted(Contender):
    """Precedent's drafters and planner."""

    def __init__(
        self,
        name: str,
        drafters: Sequence[Drafter],
        planner: Planner,
        budget: int,
        end_id: int,
        one_path: bool = False,
    ) -> None:
        self.name, self.planner, self.reliability = name, planner, Reliability()
        self._drafters, self._budget, self._end_ids = drafters, budget, frozenset({end_id})
        self._one_path = one_path
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
            tools=turn.tools,
            end_token_ids=self._end_ids,
        )
        self._sessions = [drafter.begin(request) for drafter in self._drafters]

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        budget = match_budget(self._budget, None, self._one_path)
        candidates = [session.match(budget) for session in self._sessions]
        limits = Limits(self._budget, 0, self._budget, self._end_ids, trust=self._trust, one_path=self._one_path)
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
        """End all drafters, and compare the estimates of all children of accepted nodes with their outcomes.

        That waits until now because steps are timed.
        """
        for session in self._sessions:
            session.end()
        for estimates, tree, path in self._steps:
            right = {ROOT, *path}
            tried = [node for node, parent in enumerate(tree.parents) if parent in right]
            outcome = np.array([node in right for node in tried], dtype=np.float64)
            self.reliability.observe(estimates[tried], outcome)
        self._steps.clear()


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender: its budget in nodes, the cost curve it plans for, and the idea it leaves out.

    `whole` marks all drafters together with nothing left out.
    """

    contender: Contender
    budget: int | None = None
    curve: str = ""
    without: str = ""
    whole: bool = False

    @property
    def name(self) -> str:
        """The name under which the results are reported."""
        return self.contender.name

    @property
    def baseline(self) -> bool:
        """Whether the contender is a baseline."""
        return not isinstance(self.contender, Drafted)


def lineup(pool: Pool, settings: Settings, end_id: int) -> list[Entry]:
    """All entries, baselines first. Raises ConfigError for an unknown drafter."""
    ours, entries = _Ours(pool, settings, end_id), [Entry(PromptLookup())]
    for budget in settings.budgets:
        one_path = settings.one_path
        found: list[Contender] = [SuffixDecoding(pool, alpha, budget, one_path) for alpha in settings.alphas]
        further = FURTHER_BASELINES if settings.baselines is None else settings.baselines
        if SuffixTree.name in further and not one_path:
            found.append(SuffixTree(pool, budget))
        found += [made(pool, budget, one_path) for made in (SglangNgram, AdaPLD) if made.name in further]
        for each in found:
            each.name = ours.label(each.name, budget)
        entries += [Entry(each, budget) for each in found]
    for budget in settings.budgets:
        alone = settings.drafters if len(settings.drafters) > 1 else ()
        entries += [one for name in alone for one in ours.entries(budget, names=(name,))]
        entries += [one for curve in settings.curves for one in ours.entries(budget, curve=curve)]
    for budget in settings.budgets:
        entries += [one for idea in settings.ablate for one in ours.entries(budget, without=idea)]
    return entries


class _Ours:
    """Makes contenders of our drafters on one pool, which share drafters, so that each index is built only once."""

    def __init__(self, pool: Pool, settings: Settings, end_id: int) -> None:
        self._pool, self._settings, self._end_id = pool, settings, end_id
        self._drafters: dict[tuple[str, str], Drafter | None] = {}

    def entries(
        self, budget: int, *, names: Sequence[str] | None = None, curve: str = "", without: str = ""
    ) -> list[Entry]:
        """One contender, or none if no drafter is left."""
        curve, whole = curve or self._settings.curves[0], names is None and not without
        found = [self._drafter(name, without) for name in names or self._settings.drafters if name != without]
        drafters = [drafter for drafter in found if drafter is not None]
        if not drafters:
            return []
        made = _PLANNERS.get(without) or self._settings.planner_kind()
        planner = made(CostCurve.through(self._settings.times(curve)))
        name = f"without {without}" if without else "+".join(drafter.name for drafter in drafters)
        label, one_path = self.label(name, budget, curve), self._settings.one_path
        drafted = Drafted(label, drafters, planner, budget, self._end_id, one_path)
        return [Entry(drafted, budget, curve, without, whole)]

    def label(self, name: str, budget: int, curve: str = "") -> str:
        """The name, with budget and curve if they distinguish it from others in the replay."""
        at = f" @{budget}" if len(self._settings.budgets) > 1 else ""
        return f"{name}{at} ({curve})" if curve not in ("", self._settings.curves[0]) else f"{name}{at}"

    def _drafter(self, name: str, without: str) -> Drafter | None:
        key = name, without if name == "recall" and without in _RECALLS else ""
        if key not in self._drafters:
            parts = DrafterParts(tokenizer_fingerprint="", executor=AtOnce(), cache=self._pool, draft_model=None)  # type: ignore[arg-type]  # has what recall needs
            made = _RECALLS.get(key[1])
            self._drafters[key] = made(self._pool) if made else next(iter(load_drafters([name], parts)), None)
        return self._drafters[key]


class _View:
    """A pool with another answer to one of its questions."""

    def __init__(self, pool: Pool, **answers: Any) -> None:
        self._pool = pool
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _recall(pool: Any, kind: type[RecallDrafter] = RecallDrafter) -> RecallDrafter:
    return kind(pool, "", AtOnce())


class _Late(RecallDrafter):
    """Recall that proposes nothing before the answer's first token."""

    def begin(self, request: Request) -> Any:
        return _LateSession(super().begin(request))


class _LateSession:
    def __init__(self, session: RecallSession) -> None:
        self._session, self._begun = session, False

    def match(self, budget: int) -> Candidates:
        return self._session.match(budget) if self._begun else Candidates(RecallDrafter.name)

    def committed(self, token_ids: Sequence[int]) -> None:
        self._begun = True
        self._session.committed(token_ids)

    def end(self) -> None:
        self._session.end()


class _NoTrail(Trail):
    """Follows nothing: every step starts from the current suffix matches alone."""

    def advance(self, text: object, aligned: object, committed: Sequence[int]) -> None:
        """Remember nothing."""


class _Unaligned(RecallDrafter):
    """Recall with suffix matches alone."""

    def begin(self, request: Request) -> RecallSession:
        session = super().begin(request)
        session.trail = _NoTrail()
        return session


_RECALLS: dict[str, Any] = {
    "similarity": lambda pool: _recall(_View(pool, recall=lambda *_, **__: [])),
    "kinship": lambda pool: _recall(_View(pool, among=lambda *_, **__: [])),
    "exact": lambda pool: _recall(
        _View(pool, since=lambda *part: [replace(one, prompt_fingerprint="") for one in pool.since(*part)])
    ),
    "anchors": lambda pool: _recall(pool, _Late),
    "holes": lambda pool: _recall(pool, _Unaligned),
}
"""Makes recall without an idea."""


class _FixedPlanner(Planner):
    """Plans with the drafters' own estimates."""

    def calibrate(self, learned: Calibration, choice: Choice, parents: Int32s, verdict: Floats) -> None:
        """Learn nothing."""


class _BelievingPlanner(Planner):
    """Plans without the trust learned in the current request."""

    def plan(self, candidates: Sequence[Candidates], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """As `Planner.plan`, with the trust of a new request."""
        return super().plan(candidates, draw_sources, replace(limits, trust=Trust()))


_PLANNERS: dict[str, type[Planner]] = {"calibration": _FixedPlanner, "trust": _BelievingPlanner}
"""The planner without an idea of `IDEAS_OF_PLANNER`."""
