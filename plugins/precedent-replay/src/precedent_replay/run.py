"""Runs a replay: selects the turns to measure, controls what each may see, and plays them through all contenders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from precedent.cache import Embedder
from precedent.text.traces import Trajectory, read_trajectories
from precedent_replay.contenders import lineup
from precedent_replay.page import ShownTurns
from precedent_replay.pool import Pool, embedded
from precedent_replay.results import Replay, replay_turn
from precedent_replay.settings import Settings
from precedent_replay.turns import Turn, TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Settings", "replay"]


def replay(
    traces: Sequence[Path],
    warm: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    embedder: Embedder | None,
    settings: Settings,
    progress: Callable[[str, int], None] = lambda what, done: None,
    shown: ShownTurns | None = None,
) -> Replay:
    """Replay traces with every contender. `progress(what, turns done)` is called along the way.

    Raises PromptError for a file that is not a chat log.
    """
    reader, pool = TurnReader(tokenizer), Pool()
    result = Replay(settings, lineup(pool, settings, reader.end_token_id))
    if embedder is not None:
        pool.vectors = embedded(_queries(reader, warm, traces, settings), embedder, progress)
    progress("replaying", 0)
    for _, turn in _turns(reader, warm):
        pool.add(turn.completion)
    owned: dict[object, set[int]] = defaultdict(set)
    if settings.pool in ("same-task", "other-tasks"):  # all answers are there; a turn's own are hidden meanwhile
        for trajectory, turn in _turns(reader, traces):
            owned[_owner(settings, trajectory)].add(pool.add(turn.completion))
    for _, calls in groupby(read_trajectories(traces), key=lambda trajectory: trajectory.number):
        run = list(calls)
        turns = [turn for trajectory in run for turn in reader.turns(trajectory)]
        if not settings.groups or run[0].group in settings.groups:
            owner = _owner(settings, run[0])
            hidden = pool.hide(owned.pop(owner, ()))
            for turn in turns:
                if result.turns == settings.limit:
                    return result
                _measure(turn, pool, result, shown or ShownTurns(0))
                progress("replaying", result.turns)
            owned[owner] = {pool.add(completion) for completion in hidden}
        if settings.pool == "online":
            for turn in turns:
                pool.add(turn.completion)
    return result


def _owner(settings: Settings, trajectory: Trajectory) -> object:
    """What names the answers that a trajectory must not see."""
    return trajectory.number if settings.pool == "same-task" else trajectory.group


def _measure(turn: Turn, pool: Pool, result: Replay, shown: ShownTurns) -> None:
    """Play one turn through every contender."""
    repeats = pool.holds(turn.token_ids)
    result.add(turn, repeats)
    for entry in result.entries:
        main = entry is result.main
        watch = shown.watch(entry.contender) if main else None
        sources = replay_turn(turn, entry.contender, result.reports[entry.name], repeats, watch)
        if main:
            shown.add(turn, sources)


def _turns(reader: TurnReader, traces: Sequence[Path]) -> Iterator[tuple[Trajectory, Turn]]:
    return ((trajectory, turn) for trajectory in read_trajectories(traces) for turn in reader.turns(trajectory))


def _queries(reader: TurnReader, warm: Sequence[Path], traces: Sequence[Path], settings: Settings) -> Iterator[str]:
    """All queries; for the online pool, those up to the last measured turn."""
    yield from (turn.query for _, turn in _turns(reader, warm))
    measured = 0
    for trajectory, turn in _turns(reader, traces):
        oracle = settings.pool in ("same-task", "other-tasks")
        if not oracle and settings.limit is not None and measured > settings.limit:
            return
        yield turn.query
        measured += not settings.groups or trajectory.group in settings.groups
