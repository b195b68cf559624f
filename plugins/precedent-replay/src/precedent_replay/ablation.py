"""Ablations: the same drafters with one idea left out and everything else equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from precedent.cache import Completion, Hit
from precedent.drafters import Candidates, Drafter, DrafterParts, DraftSession, DrawSession, Request, load_drafters
from precedent.drafters.base import DrawSource
from precedent.drafters.matching.alignment import Trail
from precedent.drafters.recall.drafter import RecallDrafter, RecallSession
from precedent.errors import ConfigError
from precedent.planning.calibration import Trust
from precedent.planning.choose import Choice
from precedent.planning.planner import Limits, Plan, Planner
from precedent.runtime.background import AtOnce
from precedent.runtime.compiled import Floats, Int32s
from precedent_replay.pool import Pool

IDEAS = {
    "similarity": "recall without search: all completions weigh the same, except those of the very same prompt",
    "kinship": "recall that ignores workflow step, tools, record and age, and weighs words only",
    "exact": "recall that does not know which completions answered the very same prompt",
    "anchors": "nothing from recall before the answer's first token",
    "holes": "recall that cannot rejoin a completion after a name or number differed",
    "calibration": "the drafters' own estimates, nothing learned",
    "trust": "no per-request trust: a source's record within a request does not count",
}
"""What can be left out besides a whole drafter, which is given by name."""

_IDEAS_OF_PLANNING = {"calibration", "trust"}
_IDEAS_OF_RECALL = frozenset(IDEAS) - _IDEAS_OF_PLANNING


def check(ablate: Sequence[str], drafters: Sequence[str]) -> None:
    """Raise ConfigError for an unknown idea, or a drafter that does not take part."""
    there_are = [*IDEAS, *drafters]
    for name in ablate:
        if name not in there_are:
            raise ConfigError(f"cannot leave out {name!r}; choose one of {', '.join(there_are)}")


class DrafterShelf:
    """The drafters on one pool. Contenders share them, so that each index is built only once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._drafters: dict[tuple[str, str], Drafter | None] = {}

    def take(self, names: Sequence[str], without: str = "") -> list[Drafter]:
        """The named drafters, without one of them or one idea; drafters that cannot be built are left out."""
        idea = without if without in _IDEAS_OF_RECALL else ""
        found = [self._one(name, idea if name == "recall" else "") for name in names if name != without]
        return [drafter for drafter in found if drafter is not None]

    def _one(self, name: str, idea: str) -> Drafter | None:
        if (name, idea) not in self._drafters:
            self._drafters[name, idea] = self._made(name, idea)
        return self._drafters[name, idea]

    def _made(self, name: str, idea: str) -> Drafter | None:
        if idea == "anchors":
            whole = self._one(name, "")
            return None if whole is None else _Late(whole)
        if idea == "holes":
            return _Unaligned(self._pool, "", AtOnce())  # type: ignore[arg-type]  # has what recall needs
        view = {"similarity": _Unsearched, "kinship": _Unrelated, "exact": _Unmarked}.get(idea)
        cache = self._pool if view is None else view(self._pool)
        parts = DrafterParts(tokenizer_fingerprint="", executor=AtOnce(), cache=cache, draft_model=None)  # type: ignore[arg-type]  # has what recall needs
        return next(iter(load_drafters([name], parts)), None)


class FixedPlanner(Planner):
    """Plans with the drafters' own estimates."""

    def calibrate(self, choice: Choice, parents: Int32s, verdict: Floats) -> None:
        """Learn nothing."""


class BelievingPlanner(Planner):
    """Plans without the trust learned in the current request."""

    def plan(self, candidates: Sequence[Candidates], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """As `Planner.plan`, with the trust of a new request."""
        return super().plan(candidates, draw_sources, replace(limits, trust=Trust()))


PLANNERS: dict[str, type[Planner]] = {"calibration": FixedPlanner, "trust": BelievingPlanner}
"""The planner without an idea, if it is not `Planner`."""


class _View:
    """The pool as recall sees it, but for what a subclass hides."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)


class _Unsearched(_View):
    """A pool in which no query has a neighbour."""

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        return []


class _Unrelated(_View):
    """A pool that returns no metadata of a completion."""

    def among(self, ids: Iterable[int], *, tenant: str) -> list[Completion]:
        return []


class _Unmarked(_View):
    """A pool in which no completion names the prompt it answered."""

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[Completion]:
        found = self.pool.since(tenant, tokenizer, after_id)
        return [replace(completion, prompt_fingerprint="") for completion in found]


class _Late:
    """A drafter that proposes nothing before the answer's first token."""

    def __init__(self, drafter: Drafter) -> None:
        self.name, self._drafter = drafter.name, drafter

    def begin(self, request: Request) -> DraftSession:
        return _LateSession(self.name, self._drafter.begin(request))

    def close(self) -> None:
        self._drafter.close()


class _LateSession:
    def __init__(self, source: str, session: DraftSession | DrawSession) -> None:
        self._source, self._session, self._begun = source, session, False

    def match(self, budget: int) -> Candidates:
        return self._session.match(budget) if self._begun else Candidates(self._source)

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
