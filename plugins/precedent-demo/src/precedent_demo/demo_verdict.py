"""Sums up a demo's figures in words, and says so if they allow no conclusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from precedent.cli.speedup import FEWEST_FOR_INTERVAL
from precedent.runtime.machine_load import BUSY_SHARE

NAMED = ("both", "repeat")
"""The runs whose speed-ups the verdict names."""

Results = Mapping[str, Any]


def verdict(results: Results) -> str:
    """The sentences below the table: tokens per step, the speed-up or why there is none, and the guarantee."""
    return f"{_steps(results)} {_speed(results)} {_promise(results)}"


def so_far(runs: Sequence[Mapping[str, Any]], busy: float | None) -> str:
    """One line while the demo measures: the speed-ups after the requests so far, unless other programs disturb them."""
    done = f"after {requests(runs[0]['requests'])}"
    if busy is not None and busy > BUSY_SHARE:
        return f"{done}: no speed-up is shown, other programs use {busy:.0%} of the CPU"
    named = [run for run in runs if run["name"] in NAMED]
    shown = [f"{run['name']} {_shown(run, 'decode')} in decoding, {_shown(run, 'request')} in all" for run in named]
    return f"{done}, times as fast as plain: {'; '.join(shown)}"


def doubts(results: Results) -> list[str]:
    """The reasons not to report a speed-up; empty if there are none."""
    found, number, busy = [], results["runs"][0]["requests"], results["machine"]["others_cpu_share"]
    if number < FEWEST_FOR_INTERVAL:
        found.append(
            f"{requests(number)} {'is' if number == 1 else 'are'} too few (use --requests {FEWEST_FOR_INTERVAL})"
        )
    if busy is not None and busy > BUSY_SHARE:
        found.append(f"other programs used {busy:.0%} of the CPU meanwhile (run it again on an idle machine)")
    return found


def requests(number: int) -> str:
    """A number of requests, in the singular or plural."""
    return "1 request" if number == 1 else f"{number} requests"


def _steps(results: Results) -> str:
    runs = _by_name(results)
    return (
        f"With a cache warmed by other requests, the model produced {runs['both']['tokens_per_step']:.1f} tokens per "
        f"step, and {runs['repeat']['tokens_per_step']:.1f} once the cache held these requests too; "
        "plain decoding produces 1."
    )


def _speed(results: Results) -> str:
    reasons, runs = doubts(results), _by_name(results)
    if reasons:
        return f"No speed-up is reported: {' and '.join(reasons)}."
    decode, whole = (" and ".join(_shown(runs[name], what) for name in NAMED) for what in ("decode", "request"))
    unknown = results["machine"]["others_cpu_share"] is None
    caveat = " The load from other programs is not known." if unknown else ""
    return (
        f"Decoding was {decode} times as fast as plain decoding; whole requests, prefill included, {whole} times "
        f"(in brackets: 95 % confidence intervals).{caveat}"
    )


def _shown(run: Mapping[str, Any], what: str) -> str:
    """A speed-up and, if there is one, its interval in brackets."""
    interval = run[f"{what}_speedup_interval"]
    brackets = f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
    return f"{run[f'{what}_speedup']:.1f}{brackets}"


def _promise(results: Results) -> str:
    if results["temperature"] > 0:
        return "Every answer was sampled from the target model's own output distribution."
    same, total = results["identical_outputs"]["both"]
    return f"{same} of {total} answers were identical to plain decoding; the target model itself chose every token."


def _by_name(results: Results) -> dict[str, Mapping[str, Any]]:
    return {run["name"]: run for run in results["runs"]}
