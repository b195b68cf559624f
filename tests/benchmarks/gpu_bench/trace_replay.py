"""Recorded answers through real forwards: every step is computed in full, the recorded tokens decide what is accepted.

First the drafters play the traces on the host (`precedent.replay`), and every tree and its accepted path is kept. Then
the same trees go through the model, several turns at a time: forward, verification with its read, commit. The time that
the drafters took is added, as if nothing had been hidden behind a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from gpu_bench.setting import Setting
from gpu_bench.steps import BATCHES
from precedent.config import SamplingParams
from precedent.replay.lineup import Entry
from precedent.replay.run import Observer, Settings, replay
from precedent.replay.simulate import Watch
from precedent.replay.turns import Turn
from precedent.sampling import CounterCoins, TargetRows
from precedent.target import Slot
from precedent.tree import EMPTY_TREE, CandidateTree
from precedent.verify import verify

Row = dict[str, Any]
GREEDY = SamplingParams()

LONGEST_PROMPT = 6000
"""Turns with longer prompts are left out: 32 of these fit in the arena of a GPU with 80 GB."""


@dataclass
class Played:
    """One recorded turn: its prompt's length, its answer, and the tree and path of every step."""

    prompt_tokens: int
    answer: Sequence[int]
    steps: list[tuple[CandidateTree, tuple[int, ...]]] = field(default_factory=list)

    @property
    def plain(self) -> Played:
        """The same turn, one token per step."""
        return Played(self.prompt_tokens, self.answer, [(EMPTY_TREE, ())] * len(self.answer))


class Keeper(Observer):
    """Keeps what the main contender proposed, up to `longest` prompt tokens."""

    def __init__(self, longest: int) -> None:
        self.turns: list[Played] = []
        self._longest = longest

    def watch(self, turn: Turn, entry: Entry) -> Watch | None:
        """A turn begins."""
        if len(turn.prompt_ids) > self._longest:
            return None
        played = Played(len(turn.prompt_ids), turn.token_ids)
        self.turns.append(played)
        return lambda tree, path, before: played.steps.append((tree, tuple(path)))


def replayed(setting: Setting) -> Iterator[Row]:
    """Tokens per second with drafts and plainly, at equal batch. Nothing without `--traces`."""
    if not setting.given.traces:
        yield {"failed": "no --traces were given"}
        return
    for pool in ("same-task", "other-tasks"):
        keeper, drafting = played(setting, pool)
        for batch in BATCHES if not setting.small else (1, 2):
            setting.check_time()
            yield {"pool": pool, "batch": batch, **_rates(setting, keeper.turns, batch, drafting)}


def played(setting: Setting, pool: str) -> tuple[Keeper, float]:
    """What the drafters proposed, at most 64 nodes planned for the GPU curve, and how many seconds a step they took."""
    from transformers import AutoTokenizer

    from precedent.testing.tiny_models import byte_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting.given.tokenizer) if setting.given.tokenizer else byte_tokenizer()
    keeper = Keeper(500 if setting.small else LONGEST_PROMPT)
    settings = Settings(pool=pool, budgets=(64,), curves=("gpu",), limit=setting.given.turns, baselines=())
    result = replay(setting.given.traces, [], tokenizer, None, settings, observer=keeper)
    assert result.main is not None
    times = result.reports[result.main.name].microseconds
    return keeper, sum(times) / max(len(times), 1) / 1e6


def _rates(setting: Setting, turns: Sequence[Played], batch: int, drafting: float) -> Row:
    tokens = sum(len(turn.answer) for turn in turns)
    steps = sum(len(turn.steps) for turn in turns)
    before = setting.static.static.forwards
    ours = _seconds(setting, turns, batch)
    as_graphs = setting.static.static.forwards - before
    plain = _seconds(setting, [turn.plain for turn in turns], batch)
    drafted = ours + drafting * steps
    return {
        "turns": len(turns),
        "tokens_per_step": tokens / steps,
        "plain_tokens_per_second": tokens / plain,
        "tokens_per_second": tokens / drafted,
        "speedup": plain / drafted,
        "speedup_without_drafting": plain / ours,
        "drafting_us_per_step": 1e6 * drafting,
        "forwards_of_fixed_size": as_graphs,
    }


def _seconds(setting: Setting, turns: Sequence[Played], batch: int) -> float:
    """Seconds to decode all turns, `batch` at a time, a finished one making room for the next; after a warm-up."""
    return [_decode(setting, turns, batch) for _ in range(2)][-1]


def _decode(setting: Setting, turns: Sequence[Played], batch: int) -> float:
    waiting, running, seconds = list(reversed(turns)), list[tuple[Played, Slot, int]](), 0.0
    while waiting or running:
        while waiting and len(running) < batch:
            turn = waiting.pop()
            room = len(turn.answer) + 72
            running.append((turn, setting.slot_of(setting.static, turn.prompt_tokens, room), 0))
        setting.wait()
        started = perf_counter()
        running = _one_step(setting, running)
        seconds += perf_counter() - started
    return seconds


def _one_step(setting: Setting, running: list[tuple[Played, Slot, int]]) -> list[tuple[Played, Slot, int]]:
    """Forward, verification and commit of all; returns those that go on."""
    target = setting.static
    scored = target.score([(slot, turn.steps[at][0]) for turn, slot, at in running])
    left = []
    for (turn, slot, at), logits in zip(running, scored, strict=True):
        tree, path = turn.steps[at]
        verify(tree, TargetRows(logits, tree, GREEDY, at_once=True), "greedy", CounterCoins(1, at))
        target.commit(slot, tree, path, 1)
        if at + 1 < len(turn.steps):
            left.append((turn, slot, at + 1))
    return left
