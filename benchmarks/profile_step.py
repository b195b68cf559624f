"""Time of one step by part, without and with a candidate tree.

    python benchmarks/profile_step.py [--tokens 128] [--svg docs/images/step.svg] [--json FILE]

A list is continued twice from the same prompt: plainly, and with drafts from the list itself. Times inside the forward
pass come from timers around the functions in `PARTS`.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

from measuring import options, run
from precedent import Engine, SamplingParams, SpeculationConfig
from precedent_cpu import linear as cpu_linear
from precedent_cpu import norm as cpu_norm
from precedent_cpu import row_layer
from precedent_cpu import support as cpu_support

PROMPT = "".join(f"Order {n}: the lamp was sent on Monday and will arrive on Thursday.\n" for n in range(1001, 1030))
PARTS: dict[str, tuple[Any, str]] = {
    "layers in one piece": (row_layer, "run_on_team"),
    "products": (cpu_linear, "row_product"),
    "norms": (cpu_norm, "norm_rows"),
    "attention": (cpu_support, "row_attention"),
}
COLOURS = ("#e0a93b", "#4c78a8", "#72b7b2", "#54a24b", "#bab0ac", "#f58518", "#e45756", "#b279a2")


def measure(given: Namespace) -> dict[str, Any]:
    engine = Engine.load(given.target)
    ways = {
        "plain": SpeculationConfig(enabled=False),
        "with a tree": SpeculationConfig(drafters=("prompt",), write_back=False),
    }
    found = {way: profile(engine, speculation, given.tokens) for way, speculation in ways.items()}
    engine.close()
    if given.svg:
        given.svg.write_text(picture({way: each["parts"] for way, each in found.items()}), encoding="utf-8")
    return found


def profile(engine: Engine, speculation: SpeculationConfig, tokens: int) -> dict[str, Any]:
    """Milliseconds per step by part, rows and tokens per step."""
    asked = tuple(engine.tokenizer(PROMPT)["input_ids"]), SamplingParams(temperature=0.0, max_tokens=tokens)
    engine.submit(*asked, speculation=speculation).result()  # the first run warms up
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as timers:
        for part, (module, name) in PARTS.items():
            timers.enter_context(patch.object(module, name, timed(getattr(module, name), spent, part)))
        started = perf_counter()
        stats = engine.submit(*asked, speculation=speculation).result().stats
        whole = perf_counter() - started - stats.prefill_seconds
    outside = {
        "match and plan": stats.draft_seconds,
        "verify and commit": stats.verify_seconds,
        "between the steps": max(0.0, whole - stats.forward_seconds - stats.draft_seconds - stats.verify_seconds),
    }
    inside = {part: spent[part] for part in PARTS}
    parts = inside | {"rest of the forward": stats.forward_seconds - sum(inside.values())} | outside
    milliseconds = {part: taken / stats.num_steps * 1e3 for part, taken in parts.items()}
    return {
        "rows": 1 + stats.num_draft_tokens / stats.num_steps,
        "tokens_per_step": stats.tokens_per_step,
        "parts": milliseconds,
        "outside_forward": sum(milliseconds[part] for part in outside),
    }


def timed(function: Any, spent: dict[str, float], part: str) -> Any:
    def measured(*args: Any) -> Any:
        started = perf_counter()
        try:
            return function(*args)
        finally:
            spent[part] += perf_counter() - started

    return measured


def picture(profiles: dict[str, dict[str, float]]) -> str:
    """Draw one bar per way, to one scale."""
    scale = 560 / max(sum(parts.values()) for parts in profiles.values())
    pieces = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 190" font-family="sans-serif" font-size="13">']
    for line, (way, parts) in enumerate(profiles.items()):
        left, top = 110.0, 20 + 50 * line
        pieces.append(f'<text x="100" y="{top + 20}" text-anchor="end">{way}</text>')
        for colour, (part, taken) in zip(COLOURS, parts.items(), strict=True):
            place = f'x="{left:.1f}" y="{top}" width="{taken * scale:.1f}" height="30"'
            pieces.append(f'<rect {place} fill="{colour}"><title>{part}: {taken:.2f} ms</title></rect>')
            left += taken * scale
        pieces.append(f'<text x="{left + 6:.1f}" y="{top + 20}">{sum(parts.values()):.0f} ms</text>')
    for number, (colour, part) in enumerate(zip(COLOURS, parts, strict=True)):
        x, y = 110 + 160 * (number % 4), 130 + 25 * (number // 4)
        pieces.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        pieces.append(f'<text x="{x + 18}" y="{y + 11}">{part}</text>')
    return "\n".join([*pieces, "</svg>", ""])


if __name__ == "__main__":
    run(options(__doc__, target="smollm2-135m-instruct", tokens=128, svg=Path), measure)
