"""What each way of drafting proposed at every step of the recorded turns, found before anything is timed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from gpu_bench.setting import Setting
from precedent.engine.warm_up import compile_inner_loops
from precedent.text.traces import read_trajectories
from precedent.tree import EMPTY_TREE, CandidateTree
from precedent_replay.baselines import PromptLookup
from precedent_replay.contenders import Contender
from precedent_replay.lineup import Entry, lineup
from precedent_replay.pool import Answer, Pool
from precedent_replay.run import Observer, Settings, replay
from precedent_replay.simulate import Report, Watch, replay_turn
from precedent_replay.turns import Turn, TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_PROMPT = 6000
"""Turns with longer prompts are left out: 32 of these fit in the arena of a GPU with 80 GB."""

NODES = 64
"""At most so many are proposed per step, planned for the GPU curve."""


@dataclass
class Played:
    """One recorded turn: its prompt's length, its answer, and the tree and path of every step."""

    prompt_tokens: int
    answer: Sequence[int]
    steps: list[tuple[CandidateTree, tuple[int, ...]]] = field(default_factory=list)

    def keep(self, tree: CandidateTree, path: Sequence[int], before: Sequence[int]) -> None:
        """One step more."""
        self.steps.append((tree, tuple(path)))


@dataclass
class Recording:
    """All turns as one way of drafting played them, and the seconds of drafting that a step took."""

    turns: list[Played]
    drafting: float = 0.0


class Recorder:
    """Reads the traces once, and lets everybody play the same turns."""

    def __init__(self, setting: Setting) -> None:
        self._traces, self._limit = setting.given.traces, setting.given.turns
        self.longest = 500 if setting.small else LONGEST_PROMPT
        self._tokenizer = _tokenizer(setting)
        self._reader = TurnReader(self._tokenizer)
        self.turns = list(self._turns())
        compile_inner_loops()  # or the first steps' drafting would hold it

    def _turns(self) -> Iterator[Turn]:
        """The first turns, less those with too long prompts: what `replay` measures and `_Keeper` keeps."""
        every = (turn for one in read_trajectories(self._traces) for turn in self._reader.turns(one))
        return (turn for turn in islice(every, self._limit) if len(turn.prompt_ids) <= self.longest)

    def plain(self) -> Recording:
        """One token per step."""
        steps = [(len(turn.prompt_ids), turn.token_ids) for turn in self.turns]
        return Recording([Played(size, answer, [(EMPTY_TREE, ())] * len(answer)) for size, answer in steps])

    def ours(self, pool: str) -> Recording:
        """Our drafters with a memory of all turns but the same trajectory's, or but the same task's."""
        keeper = _Keeper(self.longest)
        settings = Settings(pool=pool, budgets=(NODES,), curves=("gpu",), limit=self._limit, baselines=())
        result = replay(self._traces, [], self._tokenizer, None, settings, observer=keeper)
        assert result.main is not None
        return Recording(keeper.turns, _seconds_of_a_step(result.reports[result.main.name]))

    def misled(self) -> Recording:
        """Our recall alone, with a memory of wrong answers under the very prompts that are asked.

        Of every answer there are two, each with every second token and the first one replaced by any other: what
        follows a match is wrong.
        """
        pool, choose = Pool(None), random.Random(0)
        for turn in self.turns:
            for shift in range(2):
                pool.add(Answer.of(replace(turn, token_ids=self._wrong(turn.token_ids, shift, choose))))
        settings = Settings(budgets=(NODES,), drafters=("recall",), curves=("gpu",), baselines=())
        entries = lineup(pool, settings, self._reader.end_token_id)
        return self._played(next(entry.contender for entry in entries if entry.whole))

    def _wrong(self, answer: Sequence[int], shift: int, choose: random.Random) -> tuple[int, ...]:
        size = len(self._tokenizer)
        return tuple(
            token if place and place % 2 == shift else (token + choose.randrange(1, size)) % size
            for place, token in enumerate(answer)
        )

    def prompt_lookup(self) -> Recording:
        """As transformers' prompt lookup: one chain of what followed the last tokens in the prompt."""
        contender = PromptLookup()
        for turn in self.turns[:1]:
            replay_turn(turn, contender, Report())  # compiled here; it remembers nothing
        return self._played(contender)

    def _played(self, contender: Contender) -> Recording:
        report, played = Report(), list[Played]()
        for turn in self.turns:
            played.append(Played(len(turn.prompt_ids), turn.token_ids))
            replay_turn(turn, contender, report, watch=played[-1].keep)
        return Recording(played, _seconds_of_a_step(report))


class _Keeper(Observer):
    """Keeps what the main contender proposed, up to `longest` prompt tokens."""

    def __init__(self, longest: int) -> None:
        self.turns: list[Played] = []
        self._longest = longest

    def watch(self, turn: Turn, entry: Entry) -> Watch | None:
        """A turn begins."""
        if len(turn.prompt_ids) > self._longest:
            return None
        self.turns.append(Played(len(turn.prompt_ids), turn.token_ids))
        return self.turns[-1].keep


def _tokenizer(setting: Setting) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from precedent.testing.tiny_models import byte_tokenizer

    return AutoTokenizer.from_pretrained(setting.given.tokenizer) if setting.given.tokenizer else byte_tokenizer()


def _seconds_of_a_step(report: Report) -> float:
    return sum(report.microseconds) / max(len(report.microseconds), 1) / 1e6
