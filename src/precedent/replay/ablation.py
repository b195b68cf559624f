"""What does each idea bring? The same drafters with one idea left out, everything else equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from precedent.cache.store.records import Hit, StoredCompletion
from precedent.drafters import Candidates, Drafter, DrafterParts, DraftSession, DrawSession, Request, load_drafters
from precedent.drafters.matching.alignment import Trail
from precedent.drafters.recall.drafter import RecallDrafter, RecallSession
from precedent.errors import ConfigError
from precedent.planning.choose import Choice
from precedent.planning.plan import DrawSource, Limits, Plan
from precedent.planning.planner import Planner
from precedent.planning.trust import Trust
from precedent.replay.pool import Pool
from precedent.runtime.compiled import Floats, Int32s
from precedent.runtime.inline_executor import AtOnce

IDEAS = {
    "similarity": "recall without search: all completions weigh alike, but for those of the very same prompt",
    "kinship": "recall that weighs neither workflow step, tools, record nor age, only words",
    "exact": "recall that does not know which completions answered the very same prompt",
    "anchors": "nothing from recall before the answer's first token",
    "holes": "no way back into a completion after a name or number differed",
    "calibration": "estimates as shipped, nothing learned",
    "trust": "every source is believed alike in every request, whatever became there of what it proposed",
}
"""What can be left out beside a whole drafter, which goes by its name."""

_IDEAS_OF_PLANNING = {"calibration", "trust"}
_IDEAS_OF_RECALL = frozenset(IDEAS) - _IDEAS_OF_PLANNING


def check(ablate: Sequence[str], drafters: Sequence[str]) -> None:
    """Raises ConfigError for an idea that does not exist or a drafter that takes no part."""
    there_are = [*IDEAS, *drafters]
    for name in ablate:
        if name not in there_are:
            raise ConfigError(f"cannot leave out {name!r}; choose of {', '.join(there_are)}")


class DrafterShelf:
    """The drafters on one pool. Contenders share them, so that each index is built once and not once for everyone."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._drafters: dict[tuple[str, str], Drafter | None] = {}

    def take(self, names: Sequence[str], without: str = "") -> list[Drafter]:
        """The named drafters, without one of them or one idea; those that miss a part take no part."""
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
            return _Unaligned(self._pool, "", AtOnce())
        view = {"similarity": _Unsearched, "kinship": _Unrelated, "exact": _Unmarked}.get(idea)
        cache = self._pool if view is None else view(self._pool)
        parts = DrafterParts(tokenizer_fingerprint="", executor=AtOnce(), cache=cache, draft_model=None)  # type: ignore[arg-type]  # what recall needs of a cache
        return next(iter(load_drafters([name], parts)), None)


class FixedPlanner(Planner):
    """Plans with the estimates that drafters ship."""

    def calibrate(self, choice: Choice, parents: Int32s, verdict: Floats) -> None:
        """Learn nothing."""


class BelievingPlanner(Planner):
    """Plans as if nothing were known of the request at hand."""

    def plan(self, candidates: Sequence[Candidates], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """As everywhere, with a new request's trust."""
        return super().plan(candidates, draw_sources, replace(limits, trust=Trust()))


PLANNERS: dict[str, type[Planner]] = {"calibration": FixedPlanner, "trust": BelievingPlanner}
"""Who plans without an idea, where not `Planner` does."""


@dataclass(frozen=True, slots=True)
class _View:
    """The pool as recall sees it."""

    pool: Pool

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        return self.pool.recall(query, tenant=tenant, tokenizer=tokenizer, k=k)

    def among(self, ids: Iterable[int], *, tenant: str) -> list[StoredCompletion]:
        return self.pool.among(ids, tenant=tenant)

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[StoredCompletion]:
        return self.pool.since(tenant, tokenizer, after_id)

    def epoch(self) -> int:
        return self.pool.epoch()

    def gone_since(self, epoch: int) -> tuple[int, None]:
        return self.pool.gone_since(epoch)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        self.pool.credit(counts)


class _Unsearched(_View):
    """Nothing is near anything."""

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        return []


class _Unrelated(_View):
    """Of no completion is known what it was said for."""

    def among(self, ids: Iterable[int], *, tenant: str) -> list[StoredCompletion]:
        return []


class _Unmarked(_View):
    """No completion says which prompt it answered."""

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[StoredCompletion]:
        found = self.pool.since(tenant, tokenizer, after_id)
        return [replace(completion, prompt_fingerprint="") for completion in found]


class _Late:
    """A drafter that is silent until the answer has begun."""

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
    """Follows nothing: every step starts from what matches at its end."""

    def advance(self, text: object, aligned: object, committed: Sequence[int]) -> None:
        """Remember nothing."""


class _Unaligned(RecallDrafter):
    """Recall by suffix matches alone."""

    def begin(self, request: Request) -> RecallSession:
        session = super().begin(request)
        session._trail = _NoTrail()
        return session
