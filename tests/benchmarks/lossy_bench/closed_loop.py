"""What a mode gains and loses in whole conversations: tokens per step, requests solved, total variation spent."""

from __future__ import annotations

from typing import Any

from lossy_bench.desk import DRAFT, Desk
from precedent_demo.evaluation import wilson


def measure(desk: Desk, mode: str, temperature: float, requests: int) -> dict[str, Any]:
    """Serve the first held-out requests with the draft model, verified by a mode."""
    with desk.engine(mode, DRAFT) as (engine, ended):
        solved = desk.served(engine, temperature, requests)
    stats = [result.stats for result in ended]
    tokens, steps = sum(each.num_output_tokens for each in stats), sum(each.num_steps for each in stats)
    return {
        "mode": mode,
        "temperature": temperature,
        "requests": requests,
        "solved": sum(solved),
        "interval": list(wilson(sum(solved), requests)),
        "tokens": tokens,
        "tokens_per_step": tokens / steps,
        "spent_per_token": sum(each.spent_tv for each in stats) / tokens,
        "solved_each": solved,
    }


def against(lossless: dict[str, Any], found: dict[str, Any]) -> tuple[int, int]:
    """Of the same requests, how many only the lossless mode solves, and how many only the other."""
    pairs = list(zip(lossless["solved_each"], found["solved_each"], strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
