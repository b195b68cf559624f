"""What a demo's figures say, in words, and what they cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precedent.runtime.machine_load import BUSY_SHARE

FEWEST_FOR_SPEED = 6
"""Requests from which a speed is said: six pairs of times that all point one way are chance in 3 of 100."""

Results = Mapping[str, Any]


def verdict(results: Results) -> str:
    """The sentences below the table: tokens per step, then speed or why there is none, then the guarantee."""
    return f"{_steps(results)} {_speed(results)} {_promise(results)}"


def speed(run: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """How many times as fast a run decoded as the plain one; 0 where the plain one decoded nothing."""
    return float(run["tokens_per_second"] / plain["tokens_per_second"]) if plain["tokens_per_second"] else 0.0


def doubts(results: Results) -> list[str]:
    """Why nothing can be said of speed; empty where it can."""
    found, number, busy = [], results["runs"][0]["requests"], results["machine"]["others_cpu_share"]
    if number < FEWEST_FOR_SPEED:
        found.append(
            f"{requests(number)} {'is' if number == 1 else 'are'} too few (give --requests {FEWEST_FOR_SPEED})"
        )
    if busy is not None and busy > BUSY_SHARE:
        found.append(f"other programs took {busy:.0%} of the processors meanwhile (run it again when they rest)")
    return found


def requests(number: int) -> str:
    """A number of requests in words."""
    return "1 request" if number == 1 else f"{number} requests"


def _steps(results: Results) -> str:
    runs = _by_name(results)
    return (
        f"With a cache warmed by other requests a step of the model brought {runs['both']['tokens_per_step']:.1f} "
        f"tokens, and {runs['repeat']['tokens_per_step']:.1f} once it had seen these; plain decoding brings 1."
    )


def _speed(results: Results) -> str:
    reasons, runs = doubts(results), _by_name(results)
    if reasons:
        return f"How much faster that is cannot be said: {' and '.join(reasons)}."
    both, repeat = (speed(runs[name], runs["plain"]) for name in ("both", "repeat"))
    unknown = results["machine"]["others_cpu_share"] is None
    beside = " (how busy other programs kept this machine is not known)" if unknown else ""
    return f"Decoding was {both:.1f} and {repeat:.1f} times as fast as plain decoding{beside}."


def _promise(results: Results) -> str:
    if results["temperature"] > 0:
        return "Every answer was sampled from the target model's own output distribution."
    same, total = results["identical_outputs"]["both"]
    return f"{same} of {total} answers were identical to plain decoding's; the target model itself chose every token."


def _by_name(results: Results) -> dict[str, Mapping[str, Any]]:
    return {run["name"]: run for run in results["runs"]}
