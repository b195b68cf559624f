"""Sums up a replay's figures in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precedent.runtime.machine_load import BUSY_SHARE
from precedent_replay.baselines import PromptLookup

FEWEST_TURNS = 20
"""With fewer measured answers, the verdict calls the figures a hint."""
Results = Mapping[str, Any]
Row = Mapping[str, Any]


def verdict(found: Results) -> str:
    """What a log would gain: tokens per step, the ratio to the baselines, and the speed-up if steps were measured."""
    main = next((row for row in found["drafters"] if row["main"]), None)
    if main is None or not found["turns"]:
        return "No answer was measured: nothing can be said."
    few = f" Only {found['turns']} answers were measured: take it as a hint." if found["turns"] < FEWEST_TURNS else ""
    return f"Your log: {_compared(found, main)}{_speed(found, main)}{few}"


def says_speed(found: Results) -> bool:
    """Whether steps were measured, on a machine that was otherwise idle."""
    measured = found["settings"]["measured"]
    return measured is not None and (measured["others_cpu_share"] or 0.0) <= BUSY_SHARE


def _compared(found: Results, main: Row) -> str:
    parts = [f"{main['tokens_per_step']:.1f} tokens per step"]
    lookup = next(row for row in found["drafters"] if row["name"] == PromptLookup.name)
    if lookup["tokens_per_step"]:
        times = main["tokens_per_step"] / lookup["tokens_per_step"]
        parts.append(f"{times:.1f} times what prompt lookup reaches")
    if main["ratio"] is not None:
        parts.append(_beside_the_best(main))
    return ", ".join(parts)


def _beside_the_best(main: Row) -> str:
    percent = round((main["ratio"] - 1) * 100)
    than = f"the best baseline that verifies no more ({main['best_baseline']})"
    return f"{abs(percent)} % {'above' if percent > 0 else 'below'} {than}" if percent else f"as much as {than}"


def _speed(found: Results, main: Row) -> str:
    measured = found["settings"]["measured"]
    if measured is None:
        return ". How much faster that is depends on what a step costs; --target MODEL measures it on this machine."
    if not says_speed(found):
        busy = f"other programs took {measured['others_cpu_share']:.0%} of the processors while steps were measured"
        return f". How much faster that is cannot be said: {busy} (run it again when they rest)."
    return (
        f"; about {main['speed_on_this_machine']:.1f} times as fast on this machine, by the measured steps of "
        f"{measured['model']}. Reading prompts is not counted."
    )
