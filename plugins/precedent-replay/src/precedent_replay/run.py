"""Runs a replay: selects the turns to measure, controls what each may see, and plays them through all contenders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from precedent.cache import Embedder
from precedent.text.traces import Trajectory, read_trajectories
from precedent_replay.lineup import Entry, lineup
from precedent_replay.pool import Answer, Pool, embedded
from precedent_replay.results import Replay
from precedent_replay.settings import CURVES, Settings
from precedent_replay.simulate import Report, Watch, replay_turn
from precedent_replay.turns import Turn, TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CURVES", "Replay", "Settings", "replay"]


class Observer:
    """Observes the main contender; this base class does nothing."""

    def watch(self, turn: Turn, entry: Entry) -> Watch | None:
        """Return a callback for every step of a turn, or None."""
        return None

    def turn(self, turn: Turn, sources: Sequence[str]) -> None:
        """Called after a turn, with the source of each token."""


def replay(
    traces: Sequence[Path],
    warm: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    embedder: Embedder | None,
    settings: Settings,
    progress: Callable[[str, int], None] = lambda what, done: None,
    observer: Observer | None = None,
) -> Replay:
    """Replay traces with every contender. `progress(what, turns done)` is called along the way.

    Raises PromptError for a file that is not a chat log.
    """
    reader = TurnReader(tokenizer)
    pool = Pool(None)
    entries = lineup(pool, settings, reader.end_token_id)
    if embedder is not None:
        pool.vectors = embedded(_queries(reader, warm, traces, settings), embedder, progress)
    shown = _fill(pool, reader, warm, traces, settings)
    result = Replay(settings, entries, {entry.name: Report() for entry in entries})
    for _, calls in groupby(read_trajectories(traces), key=lambda trajectory: trajectory.number):
        run = list(calls)
        turns = [turn for trajectory in run for turn in reader.turns(trajectory)]
        if not settings.groups or run[0].group in settings.groups:
            hidden = shown.hide(pool, run[0])
            for turn in turns:
                if result.turns == settings.limit:
                    return result
                _measure(turn, pool, result, observer or Observer())
                progress("replaying", result.turns)
            shown.show(pool, hidden)
        if settings.pool == "online":
            for turn in turns:
                pool.add(Answer.of(turn))
    return result


def _measure(turn: Turn, pool: Pool, result: Replay, observer: Observer) -> None:
    """Play one turn through every contender."""
    repeats = pool.holds(turn.token_ids)
    result.add(turn, repeats)
    for entry in result.entries:
        main = entry is result.main
        watch = observer.watch(turn, entry) if main else None
        sources = replay_turn(turn, entry.contender, result.reports[entry.name], repeats, watch)
        if main:
            observer.turn(turn, sources)


class _Shown:
    """Tracks the answers in the pool by trajectory or group, so that a turn's own can be hidden."""

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
        """Hide the answers that the trajectory must not see; returns them."""
        numbers = sorted(self._by_key.pop(self._key(trajectory), ()))
        if numbers:
            pool.hide(numbers)
        return [self._answers.pop(number) for number in numbers]

    def show(self, pool: Pool, answers: Sequence[Answer]) -> None:
        """Show hidden answers again."""
        for answer in answers:
            self.add(pool, answer)


def _fill(pool: Pool, reader: TurnReader, warm: Sequence[Path], traces: Sequence[Path], settings: Settings) -> _Shown:
    """Fill the pool with the warm traces and, for the oracle pools, with all traces; a turn's own are hidden later."""
    for trajectory in read_trajectories(warm):
        for turn in reader.turns(trajectory):
            pool.add(Answer.of(turn))
    shown = _Shown(settings.pool)
    if settings.pool in ("same-task", "other-tasks"):
        for trajectory in read_trajectories(traces):
            for turn in reader.turns(trajectory):
                shown.add(pool, Answer.of(turn))
    return shown


def _queries(reader: TurnReader, warm: Sequence[Path], traces: Sequence[Path], settings: Settings) -> Iterator[str]:
    """All queries; for the online pool, those up to the last measured turn."""
    for trajectory in read_trajectories(warm):
        yield from (turn.query for turn in reader.turns(trajectory))
    measured = 0
    for trajectory in read_trajectories(traces):
        for turn in reader.turns(trajectory):
            yield turn.query
            measured += not settings.groups or turn.group in settings.groups
        if settings.pool in ("online", "none") and settings.limit is not None and measured > settings.limit:
            return
