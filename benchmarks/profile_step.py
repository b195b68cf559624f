"""Time of one step by part, without and with a candidate tree.

    python benchmarks/profile_step.py [--tokens 128] [--json FILE]

A list is continued twice from the same prompt: plainly, and with drafts from the list itself. Times inside the forward
pass come from timers around the functions in `PARTS`.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from contextlib import ExitStack
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


def measure(given: Namespace) -> dict[str, Any]:
    engine = Engine.load(given.target)
    ways = {
        "plain": SpeculationConfig(enabled=False),
        "with a tree": SpeculationConfig(drafters=("prompt",), write_back=False),
    }
    found = {way: profile(engine, speculation, given.tokens) for way, speculation in ways.items()}
    engine.close()
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


if __name__ == "__main__":
    run(options(__doc__, target="smollm2-135m-instruct", tokens=128), measure)
