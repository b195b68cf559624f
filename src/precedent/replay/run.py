"""One replay: which turns are measured, what each of them may see, and who drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from precedent.cache.embedder import Embedder
from precedent.calibration import Reliability
from precedent.compiled import Floats
from precedent.config import SpeculationConfig
from precedent.cost_curve import CostCurve
from precedent.drafters import DrafterParts, load_drafters
from precedent.errors import ConfigError
from precedent.planner import Planner
from precedent.replay.baselines import PromptLookup, SuffixDecoding, SuffixTree
from precedent.replay.contenders import AtOnce, Contender, Drafted
from precedent.replay.pool import POOLS, Answer, Pool, Vectors
from precedent.replay.simulate import Report, replay_turn
from precedent.replay.traces import Trajectory, read_trajectories
from precedent.replay.turns import Turn, TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CURVES = {
    "flat": {1: 1.0, 257: 1.0},
    "cpu": {1: 1.0, 8: 1.0, 16: 1.25, 32: 1.8, 64: 2.9},
}
"""Named cost curves: time of a step of so many tokens, one token being 1 (`cpu`: bfloat16 on a 2-core machine)."""

EMBEDDED_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Settings:
    """How to replay: see `precedent replay --help`. `groups` restricts what is measured, not what is remembered."""

    pool: str = "online"
    budget: int = 32
    drafters: tuple[str, ...] = SpeculationConfig().drafters
    alphas: tuple[float, ...] = (1.0,)
    limit: int | None = None
    curve: str = "flat"
    groups: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raises ConfigError for a pool or a curve that does not exist."""
        if self.pool not in POOLS:
            raise ConfigError(f"there is no pool {self.pool!r}; choose of {', '.join(POOLS)}")
        if self.curve not in CURVES:
            raise ConfigError(f"there is no cost curve {self.curve!r}; choose of {', '.join(CURVES)}")
        if self.budget < 1:
            raise ConfigError(f"a budget of {self.budget} nodes drafts nothing: give at least 1")


@dataclass(slots=True)
class Replay:
    """Everything that a replay found: one report per contender, in order."""

    turns: int = 0
    tokens: int = 0
    reports: dict[str, Report] = field(default_factory=dict)
    reliability: Reliability = field(default_factory=Reliability)

    def as_dict(self) -> dict[str, object]:
        """The command-line contract."""
        drafters = [report.as_dict(name) for name, report in self.reports.items()]
        return {"turns": self.turns, "tokens": self.tokens, "drafters": drafters}


Observer = Callable[[Turn, str, Sequence[str]], None]
"""Called with a turn, a contender's name, and the source of every token."""


def step_costs(curve: str) -> Floats:
    """Time of a step of 1, 2, … tokens by a named curve, one token being 1; beyond its end it rises on."""
    points = CURVES[curve]
    cost = CostCurve()
    for width, time in points.items():
        cost.observe(width, time)
    return cost.table


def replay(
    traces: Sequence[Path],
    warm: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    embedder: Embedder | None,
    settings: Settings,
    progress: Callable[[str, int], None] = lambda what, done: None,
    observe: Observer = lambda turn, name, sources: None,
) -> Replay:
    """Replay traces with every contender. `progress(what, turns done)` is called along the way.

    Raises PromptError for a file that is not a log of chats.
    """
    reader = TurnReader(tokenizer)
    vectors = None if embedder is None else _embedded(reader, [*warm, *traces], embedder, settings, progress)
    pool = Pool(vectors)
    shown = _fill(pool, reader, warm, traces, settings)
    contenders = _contenders(pool, settings, reader.end_token_id)
    result = Replay(reports={contender.name: Report() for contender in contenders})
    result.reliability = next((c.reliability for c in reversed(contenders) if isinstance(c, Drafted)), Reliability())
    costs = step_costs(settings.curve)
    for trajectory in read_trajectories(traces):
        hidden = shown.hide(pool, trajectory)
        turns = list(reader.turns(trajectory))
        if not settings.groups or trajectory.group in settings.groups:
            for turn in turns:
                if result.turns == settings.limit:
                    return result
                result.turns += 1
                result.tokens += len(turn.token_ids)
                for contender in contenders:
                    sources = replay_turn(turn, contender, result.reports[contender.name], costs)
                    observe(turn, contender.name, sources)
                progress("replaying", result.turns)
        shown.show(pool, hidden)
        if settings.pool == "online":
            for turn in turns:
                pool.add(Answer.of(turn))
    return result


class _Shown:
    """Which answers are in the pool, by trajectory and by group, so that a turn's own can be hidden."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._answers: dict[int, Answer] = {}
        self._by_key: dict[object, set[int]] = defaultdict(set)

    def _key(self, owner: Answer | Trajectory) -> object:
        number = owner.trajectory if isinstance(owner, Answer) else owner.number
        return number if self._kind == "same-task" else owner.group

    def add(self, pool: Pool, answer: Answer) -> None:
        number = pool.add(answer)
        self._answers[number] = answer
        self._by_key[self._key(answer)].add(number)

    def hide(self, pool: Pool, trajectory: Trajectory) -> list[Answer]:
        """Hide what the trajectory must not see; returns it."""
        numbers = sorted(self._by_key.pop(self._key(trajectory), ()))
        if numbers:
            pool.hide(numbers)
        return [self._answers.pop(number) for number in numbers]

    def show(self, pool: Pool, answers: Sequence[Answer]) -> None:
        """Show again what was hidden."""
        for answer in answers:
            self.add(pool, answer)


def _fill(pool: Pool, reader: TurnReader, warm: Sequence[Path], traces: Sequence[Path], settings: Settings) -> _Shown:
    """Put in what every turn may see, and for the oracle pools everything, of which each turn's own will be hidden."""
    for trajectory in read_trajectories(warm):
        for turn in reader.turns(trajectory):
            pool.add(Answer.of(turn))
    shown = _Shown(settings.pool)
    if settings.pool in ("same-task", "other-tasks"):
        for trajectory in read_trajectories(traces):
            for turn in reader.turns(trajectory):
                shown.add(pool, Answer.of(turn))
    return shown


def _embedded(
    reader: TurnReader,
    paths: Sequence[Path],
    embedder: Embedder,
    settings: Settings,
    progress: Callable[[str, int], None],
) -> Vectors:
    """The vector of every query that can occur."""
    queries = dict.fromkeys(_queries(reader, paths, settings))
    vectors: dict[str, np.ndarray] = {}
    names = list(queries)
    for begin in range(0, len(names), EMBEDDED_AT_ONCE):
        batch = names[begin : begin + EMBEDDED_AT_ONCE]
        vectors.update(zip(batch, embedder.embed(batch), strict=True))
        progress("embedding", len(vectors))
    return vectors


def _queries(reader: TurnReader, paths: Sequence[Path], settings: Settings) -> Iterator[str]:
    """All queries; for the online pool, those up to the last measured turn."""
    measured = 0
    for trajectory in read_trajectories(paths):
        for turn in reader.turns(trajectory):
            yield turn.query
            measured += not settings.groups or turn.group in settings.groups
        if settings.pool in ("online", "none") and settings.limit is not None and measured > settings.limit:
            return


def _contenders(pool: Pool, settings: Settings, end_id: int) -> list[Contender]:
    """The baselines, each drafter alone, and all drafters together."""
    contenders: list[Contender] = [PromptLookup()]
    contenders += [SuffixDecoding(pool, alpha, settings.budget) for alpha in settings.alphas]
    contenders.append(SuffixTree(pool, settings.budget))
    alone: Collection[tuple[str, ...]] = [(name,) for name in settings.drafters if len(settings.drafters) > 1]
    for names in [*alone, settings.drafters]:
        contender = _drafted(pool, names, settings, end_id)
        if contender is not None:
            contenders.append(contender)
    return contenders


def _drafted(pool: Pool, names: Sequence[str], settings: Settings, end_id: int) -> Drafted | None:
    parts = DrafterParts(tokenizer_fingerprint="", executor=AtOnce(), cache=pool, draft_model=None)  # type: ignore[arg-type]  # what recall needs of a cache
    drafters = load_drafters(names, parts)
    if not drafters:
        return None
    cost = CostCurve()
    for width, time in CURVES[settings.curve].items():
        cost.observe(width, time)
    name = "+".join(drafter.name for drafter in drafters)
    return Drafted(name, drafters, Planner(cost), settings.budget, end_id)
