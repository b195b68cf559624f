"""The replicas of a simulated fleet: what each has in memory of the shared store, and whose conversations it keeps."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from precedent.drafters.recall.tenant_memory import KEPT_SHARE
from precedent.planning.planner import Planner
from precedent.replay.contenders import Drafted
from precedent.replay.lineup import Entry, lineup
from precedent.replay.pool import Answer, Pool, Vectors
from precedent.replay.settings import Settings
from precedent.replay.turns import Turn
from precedent.runtime.compiled import Int32s


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """A run's answers in the store: `ended` runs came before it, and who answered it knows it at once."""

    ended: int
    answers: tuple[Answer, ...]
    known_to: Collection[SimulatedReplica]


class Story:
    """The shared store: the finished runs of every tenant, in the order in which they ended."""

    def __init__(self, staleness: int = 0) -> None:
        self._staleness, self._ended = staleness, 0
        self.runs: dict[str, list[_Stored]] = {}

    def has(self, tenant: str) -> bool:
        """Whether anything of the tenant is stored."""
        return bool(self.runs.get(tenant))

    def remember(
        self, tenant: str, answers: Iterable[Answer], known_to: Collection[SimulatedReplica] | None = None
    ) -> None:
        """Store a finished run; one that nobody here answered (None) was there before all."""
        self._ended += known_to is not None
        ended = self._ended if known_to is not None else -self._staleness
        self.runs.setdefault(tenant, []).append(_Stored(ended, tuple(answers), known_to or ()))

    def seen(self, run: _Stored, by: SimulatedReplica) -> bool:
        """Whether a replica that looks now sees a run."""
        return run.ended + self._staleness <= self._ended or by in run.known_to


@dataclass(slots=True)
class _View:
    """What a replica has in memory of one tenant."""

    pool: Pool
    entries: list[Entry]
    read: set[int] = field(default_factory=set)
    unread_from: int = 0
    held: deque[tuple[int, int]] = field(default_factory=deque)
    """Ids and lengths of the completions, the oldest first."""
    num_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Take a completion into memory."""
        self.held.append((self.pool.add(answer), len(answer.token_ids)))
        self.num_tokens += len(answer.token_ids)

    def shrink(self, most: float) -> None:
        """Let the oldest completions go."""
        gone = []
        while self.held and self.num_tokens > most:
            number, length = self.held.popleft()
            gone.append(number)
            self.num_tokens -= length
        self.pool.hide(gone)


class SimulatedReplica:
    """Memories of tenants within one bound, one planner for all, and the keys and values of recent conversations."""

    def __init__(
        self,
        story: Story,
        settings: Settings,
        end_id: int,
        vectors: Vectors | None,
        memory_tokens: int | None,
        kv_tokens: int,
    ) -> None:
        self._story, self._settings, self._end_id, self._vectors = story, settings, end_id, vectors
        self._memory_tokens, self._kv_tokens = memory_tokens, kv_tokens
        self._planners: dict[str, Planner] = {}
        self._views: OrderedDict[str, _View] = OrderedDict()
        self._conversations: OrderedDict[tuple[str, int], Int32s] = OrderedDict()

    def read_ahead(self) -> None:
        """Read all tenants that fit, as a replica does before it takes requests."""
        for tenant in self._story.runs:
            self._catch_up(self._view(tenant), tenant)
            if self._too_much():
                self._views.pop(tenant)
                return

    def entries(self, tenant: str) -> tuple[Sequence[Entry], bool]:
        """Who plays a tenant's turn, and whether its memory was at hand; if not, it is read after the turn."""
        at_hand = tenant in self._views
        view = self._view(tenant)
        if at_hand:
            self._catch_up(view, tenant)
            self._keep_to_bound(tenant)
        return view.entries, at_hand

    def repeats(self, tenant: str, turn: Turn) -> bool:
        """Whether the turn's answer is word for word in memory."""
        return self._views[tenant].pool.holds(turn.token_ids)

    def cached_tokens(self, tenant: str, turn: Turn) -> int:
        """Prompt tokens whose keys and values are kept here, by a conversation of the same tenant; keeps this one."""
        ids = np.array((*turn.prompt_ids, *turn.token_ids), dtype=np.int32)
        kept = [other for (owner, _), other in self._conversations.items() if owner == tenant]
        most = max((common(ids, other) for other in kept), default=0)
        self._conversations[tenant, turn.trajectory] = ids
        self._conversations.move_to_end((tenant, turn.trajectory))
        while sum(map(len, self._conversations.values())) > self._kv_tokens:
            self._conversations.popitem(last=False)
        return min(most, len(turn.prompt_ids) - 1)

    def _view(self, tenant: str) -> _View:
        if tenant not in self._views:
            pool = Pool(self._vectors)
            entries = [entry for entry in lineup(pool, self._settings, self._end_id) if not entry.baseline]
            for entry in entries:  # what is learned of acceptance is of the replica, whoever asks
                assert isinstance(entry.contender, Drafted)
                entry.contender.planner = self._planners.setdefault(entry.name, entry.contender.planner)
            self._views[tenant] = _View(pool, entries)
        self._views.move_to_end(tenant)
        return self._views[tenant]

    def _catch_up(self, view: _View, tenant: str) -> None:
        """Read the runs that are visible by now, in their order; own ones may be read before older ones of others."""
        runs = self._story.runs.get(tenant, [])
        for place in range(view.unread_from, len(runs)):
            if place not in view.read and self._story.seen(runs[place], self):
                view.read.add(place)
                for answer in runs[place].answers:
                    view.add(answer)
        while view.unread_from in view.read:
            view.read.discard(view.unread_from)
            view.unread_from += 1

    def _keep_to_bound(self, used: str) -> None:
        """Evict the least recently used tenants, and then the oldest completions of the one that is left."""
        while self._too_much() and len(self._views) > 1:
            self._views.pop(next(tenant for tenant in self._views if tenant != used))
        if self._too_much() and self._memory_tokens is not None:
            self._views[used].shrink(KEPT_SHARE * self._memory_tokens)

    def _too_much(self) -> bool:
        held = sum(view.num_tokens for view in self._views.values())
        return self._memory_tokens is not None and held > self._memory_tokens


def common(one: Int32s, other: Int32s) -> int:
    """How many first tokens two sequences share."""
    length = min(one.size, other.size)
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
