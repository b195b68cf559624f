"""Sums up a demo's figures in words, and says so if they allow no conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precedent.runtime.machine_load import BUSY_SHARE

FEWEST_FOR_SPEED = 6
"""Fewest requests for a speed-up: six pairs of times all point the same way by chance in 3 of 100 cases."""

Results = Mapping[str, Any]


def verdict(results: Results) -> str:
    """The sentences below the table: tokens per step, the speed-up or why there is none, and the guarantee."""
    return f"{_steps(results)} {_speed(results)} {_promise(results)}"


def speed(run: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """A run's tokens per second divided by the plain run's; 0 if the plain run decoded nothing."""
    return float(run["tokens_per_second"] / plain["tokens_per_second"]) if plain["tokens_per_second"] else 0.0


def doubts(results: Results) -> list[str]:
    """The reasons not to report a speed-up; empty if there are none."""
    found, number, busy = [], results["runs"][0]["requests"], results["machine"]["others_cpu_share"]
    if number < FEWEST_FOR_SPEED:
        found.append(f"{requests(number)} {'is' if number == 1 else 'are'} too few (use --requests {FEWEST_FOR_SPEED})")
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
    both, repeat = (speed(runs[name], runs["plain"]) for name in ("both", "repeat"))
    unknown = results["machine"]["others_cpu_share"] is None
    caveat = " (the load from other programs is not known)" if unknown else ""
    return f"Decoding was {both:.1f} and {repeat:.1f} times as fast as plain decoding{caveat}."


def _promise(results: Results) -> str:
    if results["temperature"] > 0:
        return "Every answer was sampled from the target model's own output distribution."
    same, total = results["identical_outputs"]["both"]
    return f"{same} of {total} answers were identical to plain decoding; the target model itself chose every token."


def _by_name(results: Results) -> dict[str, Mapping[str, Any]]:
    return {run["name"]: run for run in results["runs"]}
