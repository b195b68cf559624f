"""Where the time of one step goes, without and with a candidate tree; prints it and draws it.

    python tests/benchmarks/profile_step.py [--svg docs/images/step.svg] [--json FILE]

A list is continued twice from the same prompt: plainly, and with drafts from the list itself. Times inside the forward
come from timers around the functions that are named.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from measurement import Measurement, json_option

from precedent import Engine, SamplingParams, SpeculationConfig
from precedent.decoding.stats import GenerationStats
from precedent.target import attention
from precedent.target.cpu import linear as cpu_linear
from precedent.target.cpu import norm as cpu_norm
from precedent.target.cpu import row_layer

PROMPT = "".join(f"Order {n}: the lamp was sent on Monday and will arrive on Thursday.\n" for n in range(1001, 1030))
PARTS = {
    "layers in one piece": (row_layer, "run_on_team"),
    "products": (cpu_linear, "row_product"),
    "norms": (cpu_norm, "norm_rows"),
    "attention": (attention, "row_attention"),
}
COLOURS = {
    "layers in one piece": "#e0a93b",
    "products": "#4c78a8",
    "norms": "#72b7b2",
    "attention": "#54a24b",
    "rest of the forward": "#bab0ac",
    "match and plan": "#f58518",
    "verify and commit": "#e45756",
    "between the steps": "#b279a2",
}
OUTSIDE = ("match and plan", "verify and commit", "between the steps")


def main() -> None:
    """Measure both and print milliseconds per step."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", default="smollm2-135m-instruct")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--svg", type=Path)
    json_option(options)
    given = options.parse_args()
    measurement = Measurement()
    engine = Engine.load(given.target)
    modes = {
        "plain": SpeculationConfig(enabled=False),
        "with a tree": SpeculationConfig(drafters=("prompt",), write_back=False),
    }
    profiles = {name: profile(engine, speculation, given.tokens) for name, speculation in modes.items()}
    engine.close()
    print(f"{given.target}, {torch.get_num_threads()} threads, milliseconds per step")
    for name, (parts, rows, tokens) in profiles.items():
        print(f"\n{name}: {rows:.1f} rows and {tokens:.1f} tokens per step, {sum(parts.values()):.1f} ms")
        for part, milliseconds in parts.items():
            print(f"  {part:22} {milliseconds:8.2f}")
    measurement.write(given.json, {name: as_figures(*profile) for name, profile in profiles.items()})
    if given.svg:
        given.svg.write_text(picture({name: parts for name, (parts, _, _) in profiles.items()}), encoding="utf-8")


def profile(engine: Engine, speculation: SpeculationConfig, tokens: int) -> tuple[dict[str, float], float, float]:
    """Milliseconds per step by part, rows per step, and tokens per step."""
    token_ids = tuple(engine.tokenizer(PROMPT)["input_ids"])
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    engine.submit(token_ids, sampling, speculation=speculation).result()  # the first run warms up
    with timers() as spent:
        before = perf_counter()
        stats = engine.submit(token_ids, sampling, speculation=speculation).result().stats
        whole = perf_counter() - before - stats.prefill_seconds
    return by_part(stats, spent, whole), 1 + stats.num_draft_tokens / stats.num_steps, stats.tokens_per_step


def by_part(stats: GenerationStats, spent: dict[str, float], whole: float) -> dict[str, float]:
    """What was measured, in the order of `COLOURS`; the rest is what no timer stood around."""
    inside = {part: spent[part] for part in PARTS}
    known = {
        **inside,
        "rest of the forward": stats.forward_seconds - sum(inside.values()),
        "match and plan": stats.draft_seconds,
        "verify and commit": stats.verify_seconds,
    }
    known["between the steps"] = max(0.0, whole - stats.forward_seconds - stats.draft_seconds - stats.verify_seconds)
    return {part: seconds / stats.num_steps * 1e3 for part, seconds in known.items()}


def as_figures(parts: dict[str, float], rows: float, tokens: float) -> dict[str, Any]:
    """The JSON of one way."""
    outside = sum(parts[name] for name in OUTSIDE)
    return {"rows": rows, "tokens_per_step": tokens, "parts": parts, "outside_forward": outside}


@contextmanager
def timers() -> Iterator[dict[str, float]]:
    """Seconds spent in each of `PARTS` while the block runs."""
    spent: dict[str, float] = defaultdict(float)
    originals = {part: getattr(module, name) for part, (module, name) in PARTS.items()}
    for part, (module, name) in PARTS.items():
        setattr(module, name, timed(originals[part], spent, part))
    try:
        yield spent
    finally:
        for part, (module, name) in PARTS.items():
            setattr(module, name, originals[part])


def timed(function: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    """The function, with its time added to `spent[part]`."""

    def measured(*args: Any) -> Any:
        started = perf_counter()
        try:
            return function(*args)
        finally:
            spent[part] += perf_counter() - started

    return measured


def picture(profiles: dict[str, dict[str, float]]) -> str:
    """One bar per mode, to one scale."""
    widest = max(sum(parts.values()) for parts in profiles.values())
    pieces = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 190" font-family="sans-serif" font-size="13">']
    for line, (name, parts) in enumerate(profiles.items()):
        left, top = 110.0, 20 + 50 * line
        pieces.append(f'<text x="100" y="{top + 20}" text-anchor="end">{name}</text>')
        for part, milliseconds in parts.items():
            width = 560 * milliseconds / widest
            pieces.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="30" fill="{COLOURS[part]}">'
                f"<title>{part}: {milliseconds:.2f} ms</title></rect>"
            )
            left += width
        pieces.append(f'<text x="{left + 6:.1f}" y="{top + 20}">{sum(parts.values()):.0f} ms</text>')
    for number, (part, colour) in enumerate(COLOURS.items()):
        x, y = 110 + 160 * (number % 4), 130 + 25 * (number // 4)
        pieces.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        pieces.append(f'<text x="{x + 18}" y="{y + 11}">{part}</text>')
    return "\n".join([*pieces, "</svg>", ""])


if __name__ == "__main__":
    main()
