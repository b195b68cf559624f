"""What replicas that share a memory would gain on recorded traces: the same drafters, without a model or a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.cache.search.embedder import Embedder
from precedent.errors import ConfigError
from precedent.replay.pool import Answer
from precedent.replay.replicas import SimulatedReplica, Story
from precedent.replay.run import embedded, queries
from precedent.replay.settings import Settings
from precedent.replay.simulate import Report, replay_turn
from precedent.replay.turns import Turn, TurnReader
from precedent.routing import preferred
from precedent.text.traces import Trajectory, read_trajectories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUTINGS = ("tenant", "random", "prefix")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas, and how requests reach them. Raises ConfigError for what makes no fleet.

    - `routing`: by `tenant`; `random`, each turn anew; by `prefix`, so that a conversation stays where it began.
    - `tenants`: runs are divided among so many, by their `group` (else their task).
    - `staleness`: how many runs of all tenants end before another replica sees a finished one; 0 is at once.
    - `memory_tokens`: tokens of completions that a replica holds; beyond it the least recently used tenant's go, and
      its next turn finds nothing while they are read again. None: all.
    - `kv_tokens`: tokens of recent conversations whose keys and values a replica keeps.
    """

    replicas: int = 1
    routing: str = "tenant"
    tenants: int = 1
    staleness: int = 0
    memory_tokens: int | None = None
    kv_tokens: int = 22_000

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ConfigError(f"there is no routing {self.routing!r}; choose one of {', '.join(ROUTINGS)}")
        least = {"replicas": 1, "tenants": 1, "staleness": 0, "kv_tokens": 0, "memory_tokens": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"{name}={value} must be at least {smallest}")

    @property
    def names(self) -> list[str]:
        """The replicas."""
        return [f"replica-{number}" for number in range(self.replicas)]

    def tenant(self, run: Trajectory) -> str:
        """Whose a run is."""
        digest = blake2b((run.group or run.task).encode(), digest_size=8).digest()
        return f"tenant-{int.from_bytes(digest, 'big') % self.tenants}"

    def replica(self, tenant: str, first: Turn, number: int) -> str:
        """Who answers turn `number` of all; `first` is the first turn of its conversation."""
        begins = blake2b(repr(first.prompt_ids).encode()).hexdigest()
        key = {"tenant": tenant, "random": str(number), "prefix": begins}[self.routing]
        return preferred(key, self.names)[0]


@dataclass(slots=True)
class FleetResult:
    """The results of a simulation; shares are of turns with something to recall, and of prompt tokens."""

    fleet: Fleet
    settings: Settings
    reports: dict[str, Report] = field(default_factory=dict)
    turns: int = 0
    turns_with_memory: int = 0
    turns_at_hand: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    turns_by_replica: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; `drafters` has the rows that `precedent replay` has for ours, the whole last."""
        costs = {curve: self.settings.step_costs(curve) for curve in self.settings.curves}
        names = ("replicas", "routing", "tenants", "staleness", "memory_tokens", "kv_tokens")
        return {
            "turns": self.turns,
            "tokens": next(iter(self.reports.values()), Report()).all.tokens,
            "fleet": {name: getattr(self.fleet, name) for name in names},
            "settings": self.settings.as_dict(),
            "drafters": [report.as_dict(name, costs) for name, report in self.reports.items()],
            "hit_rate": _share(self.turns_at_hand, self.turns_with_memory),
            "prefix_hit_rate": _share(self.cached_prompt_tokens, self.prompt_tokens),
            "replicas_used": len(self.turns_by_replica),
            "busiest_share": _share(max(self.turns_by_replica.values(), default=0), self.turns),
        }


def simulate(
    traces: Sequence[Path],
    warm: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    embedder: Embedder | None,
    settings: Settings,
    fleet: Fleet,
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> FleetResult:
    """Play traces through a fleet, run by run in the order of the files.

    Raises ConfigError for settings that only a plain replay has, PromptError for a file that is not a chat log.
    """
    check(settings)
    reader = TurnReader(tokenizer)
    vectors = None
    if embedder is not None:
        vectors = embedded(queries(reader, warm, traces, settings), embedder, progress)
    settings = replace(settings, baselines=())
    story = Story(fleet.staleness)
    for trajectory in read_trajectories(warm):
        story.remember(fleet.tenant(trajectory), map(Answer.of, reader.turns(trajectory)))
    replicas = {
        name: SimulatedReplica(story, settings, reader.end_token_id, vectors, fleet.memory_tokens, fleet.kv_tokens)
        for name in fleet.names
    }
    for replica in replicas.values():
        replica.read_ahead()
    result = FleetResult(fleet, settings)
    for _, calls in groupby(read_trajectories(traces), key=lambda trajectory: trajectory.number):
        run = list(calls)
        turns = [turn for trajectory in run for turn in reader.turns(trajectory)]
        if not _play(turns, fleet.tenant(run[0]), replicas, story, result):
            break
        progress("simulating", result.turns)
    return result


def check(settings: Settings) -> None:
    """Raise ConfigError for settings that a simulation of replicas would ignore."""
    only = {
        "--pool": settings.pool != "online",
        "--groups": bool(settings.groups),
        "--ablate": bool(settings.ablate),
        "several values of --budget": len(settings.budgets) > 1,
        "several values of --curve": len(settings.curves) > 1,
        "--baselines": settings.baselines is not None,
    }
    for option, given in only.items():
        if given:
            raise ConfigError(f"{option} belongs to a replay of one process: leave it out beside --replicas")


def _play(
    turns: Sequence[Turn], tenant: str, replicas: dict[str, SimulatedReplica], story: Story, result: FleetResult
) -> bool:
    """Play one run and remember its answers; False once the limit is reached."""
    answered_by = set[SimulatedReplica]()
    for turn in turns:
        if result.turns == result.settings.limit:
            return False
        name = result.fleet.replica(tenant, turns[0], result.turns)
        answered_by.add(replicas[name])
        _measure(turn, tenant, replicas[name], story.has(tenant), result)
        result.turns_by_replica[name] += 1
    story.remember(tenant, map(Answer.of, turns), answered_by)
    return True


def _measure(turn: Turn, tenant: str, replica: SimulatedReplica, known: bool, result: FleetResult) -> None:
    entries, at_hand = replica.entries(tenant)
    repeats = replica.repeats(tenant, turn)
    for entry in entries:
        replay_turn(turn, entry.contender, result.reports.setdefault(entry.name, Report()), repeats)
    result.turns += 1
    result.turns_with_memory += known
    result.turns_at_hand += known and at_hand
    result.cached_prompt_tokens += replica.cached_tokens(tenant, turn)
    result.prompt_tokens += len(turn.prompt_ids)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
