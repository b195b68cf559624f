"""Further measurements of `precedent bench`: several requests at once, and a growing conversation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

from precedent.text.prompt import render_prompt
from precedent_replay.bench_modes import OurContestant, query_of
from precedent_replay.bench_prompts import Turn

PER_CALLER = 4
"""Requests per caller in a group; more of them shorten the share of time at its end when some callers are idle."""

Progress = Callable[[Sequence[Any]], Any]
"""Wraps an iterable to show progress."""


def concurrency(
    number: int, alone: OurContestant, together: OurContestant, prompts: Sequence[Sequence[int]], progress: Progress
) -> dict[str, Any]:
    """Compare the same requests one after the other and `number` at once, in groups; the sides take turns to start.

    Each side has its own engine, so that neither finds the other's prompts prefilled. Each side answers every group
    twice: first with prefill, then with the prompts' keys and values still cached (`prompts_read`). A group holds
    `PER_CALLER` requests for each of `number` callers, fewer if there are not enough prompts.
    """
    size = min(len(prompts) // number, PER_CALLER) * number
    groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
    spent: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for place, group in enumerate(progress(groups)):
        sides = [("alone", alone, 1), ("together", together, number)]
        for side, contestant, width in sides if place % 2 == 0 else reversed(sides):
            for time in (0, 1):
                spent[side, time].append(_answer_all(contestant, group, width))
    counts = {"requests_at_once": number, "requests": len(groups) * size}
    first, again = (_compared(spent["alone", time], spent["together", time]) for time in (0, 1))
    return {**counts, **first, "prompts_read": again}


def _compared(alone: Sequence[tuple[float, int]], together: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Tokens per second of both sides, from each group's seconds and tokens."""
    rates = [[tokens / seconds for seconds, tokens in side] for side in (alone, together)]
    whole = [sum(tokens for _, tokens in side) / sum(seconds for seconds, _ in side) for side in (alone, together)]
    return {
        "tokens_per_second_one_after_the_other": round(whole[0], 2),
        "tokens_per_second_at_once": round(whole[1], 2),
        "ratio": round(median(b / a for a, b in zip(*rates, strict=True)), 3),
    }


def _answer_all(contestant: OurContestant, prompts: Sequence[Sequence[int]], width: int) -> tuple[float, int]:
    """Seconds and tokens for all prompts, asked by `width` callers; a caller that has its answer asks the next."""
    engine, started = contestant.engine, perf_counter()

    def answer(prompt: Sequence[int]) -> int:
        generation = engine.submit(prompt, contestant.sampling, query=query_of(engine.tokenizer, prompt))
        return len(generation.result().token_ids)

    with ThreadPoolExecutor(width) as callers:
        tokens = sum(callers.map(answer, prompts))
    return perf_counter() - started, tokens


def conversation(contestant: OurContestant, turns: Sequence[Turn], tools: Any, progress: Progress) -> dict[str, Any]:
    """Time to the first token of each turn, with and without the KV cache of the turns before it.

    Each turn without reuse runs as a tenant of its own, because the KV cache of a conversation never crosses tenants.
    """
    tokenizer, said = contestant.engine.tokenizer, list[dict[str, Any]]()
    reused: list[float] = []
    fresh: list[float] = []
    lengths: list[int] = []
    for place, turn in enumerate(progress(turns)):
        said += turn.messages
        prompt = render_prompt(tokenizer, said, tools)
        lengths.append(len(prompt))
        sides = [(reused, "conversation"), (fresh, f"turn {place}")]
        for seconds, tenant in sides if place % 2 == 0 else reversed(sides):
            timing = contestant(prompt, tenant)
            seconds.append(timing.first_seconds)
        text = str(tokenizer.decode(list(timing.token_ids), skip_special_tokens=True))
        said.append(turn.answer or {"role": "assistant", "content": text})
    return {
        "turns": len(lengths),
        "prompt_tokens": lengths,
        "first_token_seconds_with_reuse": [round(one, 4) for one in reused],
        "first_token_seconds_without": [round(one, 4) for one in fresh],
        "later_turns_ratio": round(median(a / b for a, b in zip(reused[1:], fresh[1:], strict=True)), 3),
    }
