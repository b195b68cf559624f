"""Step times by number of rows and prefill speed of a target: `precedent bench --rows`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from precedent.runtime.failures import as_ours
from precedent.runtime.instructions import FEATURES, KERNELS
from precedent.target.contract import PREFILL_CHUNK
from precedent.tree import chain
from precedent_replay.bench_report import machine

if TYPE_CHECKING:
    from precedent.target.contract import Target

CHEAP_ROW = 0.05
"""Rows cheaper than this part of a step let branches pay on recorded traces (docs/how-to/llama-cpp.md)."""

ROUNDS, PREFILLS = 15, 3
"""Measurements of each number of rows, and of a whole prefill, whose medians count."""

INSTRUCTIONS = (
    "amx-int8", "amx-bf16", "avx512bf16", "avx512vnni", "avxvnni", "avx512f", "avx2", "i8mm", "dotprod", "neon",
)  # fmt: skip
"""LLVM's names of the instructions that kernels are written for."""


class StepTimer:
    """Times forward passes of a target after `context` random tokens, and prefills of random prompts."""

    def __init__(self, target: Target, context: int) -> None:
        self._target, self._choose = target, random.Random(0)
        self._slot = target.new_slot()
        target.prefill(self._slot, self._tokens(context + 1))

    def _tokens(self, count: int) -> list[int]:
        return [self._choose.randrange(self._target.vocab_size) for _ in range(count)]

    def step(self, rows: int) -> float:
        """Milliseconds of a forward pass of `rows` rows that ends with all of their logits."""
        tree = chain(self._tokens(rows - 1))
        started = perf_counter()
        self._target.score([(self._slot, tree)])[0][0, 0].item()
        spent = perf_counter() - started
        self._target.discard(self._slot)
        return spent * 1e3

    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second for a prompt that starts with `tokens` tokens to prefill, in chunks."""
        prompt, slot = self._tokens(tokens + 1), self._target.new_slot()
        started = perf_counter()
        self._target.prefill(slot, prompt, chunk=PREFILL_CHUNK)
        self._target.plain_step(slot)[0, 0].item()
        return tokens / (perf_counter() - started)


def step_times(
    target: Target,
    name: str,
    rows: Sequence[int],
    context: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Measure all numbers of rows in turns; medians. `progress(done, total)` counts rounds."""
    (found,) = compared([target], name, rows, context, progress)
    return found


def compared(
    targets: Sequence[Target],
    name: str,
    rows: Sequence[int],
    context: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """`step_times` of the same model in several back ends, in turns."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None  # not on Windows
    timers = [StepTimer(target, context) for target in targets]
    for timer in timers:
        for count in rows:  # the first forward pass of a width allocates and may compile
            try:
                timer.step(count)
            except Exception as error:
                raise as_ours(error, f"computing {count} rows") from error
    times = [{count: list[float]() for count in rows} for _ in timers]
    for number in range(ROUNDS):
        progress(number, ROUNDS)
        for count in rows:
            for timer, spent in zip(timers, times, strict=True):
                spent[count].append(timer.step(count))
    for timer in timers:
        timer.prefill(context)
    prefills = [[timer.prefill(context) for timer in timers] for _ in range(PREFILLS)]
    here = {
        "instructions": [instruction for instruction in INSTRUCTIONS if FEATURES.get(instruction)],
        "kernels": os.environ.get(KERNELS, "native"),
        "load": load,
    }
    return [
        {
            "rows": [{"rows": count, "milliseconds": round(median(spent[count]), 3)} for count in rows],
            "prefill_tokens_per_second": round(median(each), 1),
            "context": context,
            "machine": machine(target, name) | here,
        }
        for target, spent, each in zip(targets, times, zip(*prefills, strict=True), strict=True)
    ]


def bound(found: dict[str, Any]) -> str:
    """How much faster than plain steps those of a back end could be, and whether branches would pay."""
    one = found["rows"][0]["milliseconds"] / found["rows"][0]["rows"]
    gains = {each["rows"]: each["rows"] * one / each["milliseconds"] for each in found["rows"]}
    best = max(gains, key=gains.__getitem__)
    dear = (found["rows"][-1]["milliseconds"] / one - 1) / max(1, found["rows"][-1]["rows"] - 1)
    branches = "branches pay" if dear < CHEAP_ROW else "branches bring little more than the best chain"
    return (
        f"{found['machine']['backend']}: at most {gains[best]:.2f} times plain decoding, with {best} rows that are all "
        f"accepted; a further row costs {100 * dear:.0f} % of a step, where {branches}"
    )


def table(found: dict[str, Any]) -> Table:
    """The printed report."""
    where, one = found["machine"], found["rows"][0]
    title = f"{where['target']}, {where['backend']} · {where['processor']}, "
    title += f"{where['threads']} threads"
    title += "" if where["load"] is None else f", load {where['load']}"
    shown = Table(title=title, box=SIMPLE_HEAD, caption=f"prompts: {found['prefill_tokens_per_second']:.0f} tokens/s")
    for heading in ("rows", "ms", f"against {one['rows']} row" + "s" * (one["rows"] > 1)):
        shown.add_column(heading, justify="right")
    for each in found["rows"]:
        ratio = each["milliseconds"] / one["milliseconds"]
        shown.add_row(str(each["rows"]), f"{each['milliseconds']:.2f}", f"{ratio:.2f}x")
    return shown
