"""Recorded answers through real forwards: every step is computed in full, the recorded tokens decide what is accepted.

First the drafters play the traces on the host (`gpu_bench.recordings`), and every tree and its accepted path is kept.
Then the same trees go through the model, several turns at a time: forward, verification with its read, commit. The time
that the drafters took is added, as if nothing had been hidden behind a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from gpu_bench.recordings import Played, Recorder, Recording
from gpu_bench.setting import Setting
from gpu_bench.steps import BATCHES, verdicts
from precedent.config import SamplingParams
from precedent.target import Slot

Row = dict[str, Any]

WAYS: dict[tuple[str, str], Callable[[Recorder], Recording]] = {
    ("recall alone", "wrong answers"): Recorder.misled,
    ("ours", "same-task"): lambda recorder: recorder.ours("same-task"),
    ("ours", "other-tasks"): lambda recorder: recorder.ours("other-tasks"),
    ("prompt lookup", "none"): Recorder.prompt_lookup,
}
"""Who drafts, from which memory. The adversarial one comes first, beside the plain run that it must not fall behind."""


def replayed(setting: Setting) -> Iterator[Row]:
    """Tokens per second of each way and plainly, at equal batch; each fails alone. Nothing without `--traces`."""
    if not setting.given.traces:
        yield {"failed": "no --traces were given"}
        return
    recorder, found = Recorder(setting), dict[tuple[str, str], Recording]()
    for way, play in WAYS.items():
        setting.check_time()
        try:
            found[way] = play(recorder)
        except Exception as error:
            yield {**_named(way), "failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
    for batch in BATCHES if not setting.small else (1, 2):
        plain = _seconds(setting, recorder.plain().turns, batch)
        for way, recording in found.items():
            yield {**_named(way), "batch": batch, **_rates(setting, recording, batch, plain)}


def _named(way: tuple[str, str]) -> Row:
    return {"drafting": way[0], "pool": way[1]}


def _rates(setting: Setting, recording: Recording, batch: int, plain: float) -> Row:
    turns = recording.turns
    tokens, steps = sum(len(turn.answer) for turn in turns), sum(len(turn.steps) for turn in turns)
    before = setting.static.static.forwards
    ours = _seconds(setting, turns, batch)
    as_graphs = setting.static.static.forwards - before
    drafted = ours + recording.drafting * steps
    return {
        "turns": len(turns),
        "tokens_per_step": tokens / steps,
        "nodes_per_step": sum(len(tree) for turn in turns for tree, _ in turn.steps) / steps,
        "plain_tokens_per_second": tokens / plain,
        "tokens_per_second": tokens / drafted,
        "speedup": plain / drafted,
        "speedup_without_drafting": plain / ours,
        "drafting_us_per_step": 1e6 * recording.drafting,
        "forwards_of_fixed_size": as_graphs,
    }


def _seconds(setting: Setting, turns: Sequence[Played], batch: int) -> float:
    """Seconds to decode all turns, `batch` at a time, a finished one making room for the next; after a warm-up."""
    return [_decode(setting, turns, batch) for _ in range(2)][-1]


def _decode(setting: Setting, turns: Sequence[Played], batch: int) -> float:
    waiting, running, seconds = list(reversed(turns)), list[tuple[Played, Slot, int]](), 0.0
    while waiting or running:
        while waiting and len(running) < batch:
            setting.check_time()
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
    proposed = [turn.steps[at] for turn, _, at in running]
    scored = target.score([(slot, tree) for (_, slot, _), (tree, _) in zip(running, proposed, strict=True)])
    verdicts([tree for tree, _ in proposed], scored, SamplingParams(), "greedy")
    target.commit_all([(slot, tree, path, 1) for (_, slot, _), (tree, path) in zip(running, proposed, strict=True)])
    return [(turn, slot, at + 1) for turn, slot, at in running if at + 1 < len(turn.steps)]
