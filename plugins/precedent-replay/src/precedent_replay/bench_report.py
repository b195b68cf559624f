"""Reports the timings of `precedent bench`: figures for JSON, tables for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from precedent.decoding.stats import Percentiles
from precedent.runtime.machine_load import processor

if TYPE_CHECKING:
    from precedent.target import Target
    from precedent_replay.bench_lineup import Timing

BASELINES = ("plain", "generate", "prompt-lookup", "assisted")


def summary(name: str, timings: Mapping[str, Sequence[Timing]]) -> dict[str, Any]:
    """One mode's figures; each speed-up is the median, over prompts, of the ratio of decoding rates."""
    mine = timings[name]
    tokens, steps = sum(t.decode_tokens for t in mine), sum(t.steps for t in mine)
    seconds = sum(t.decode_seconds for t in mine)
    same = sum(ours.token_ids == base.token_ids for ours, base in zip(mine, timings["plain"], strict=True))
    ratios = {base: _speedup(mine, timings[base]) for base in BASELINES if base in timings}
    return {
        "name": name,
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "speedup_vs_plain": ratios["plain"],
        "speedup_vs": ratios,
        "tokens_per_step": round(tokens / steps, 3) if steps else 0.0,
        "milliseconds_per_step": round(seconds / steps * 1e3, 2) if steps else 0.0,
        "milliseconds_outside_forward_per_step": _outside(mine, steps),
        "request_seconds": round(sum(timing.total_seconds for timing in mine), 3),
        "request_speedup_vs_plain": _request_speedup(mine, timings["plain"]),
        **_latency(mine),
        "identical_outputs": [same, len(mine)],
    }


def _request_speedup(mine: Sequence[Timing], base: Sequence[Timing]) -> float:
    """The ratio of rates over all requests, each timed from its submission to its last token."""
    tokens = [sum(len(timing.token_ids) for timing in side) for side in (mine, base)]
    seconds = [sum(timing.total_seconds for timing in side) for side in (mine, base)]
    known = min(*tokens, *seconds) > 0
    return round(tokens[0] / seconds[0] / (tokens[1] / seconds[1]), 3) if known else 0.0


def _speedup(mine: Sequence[Timing], base: Sequence[Timing]) -> float:
    rates = [
        (ours.decode_tokens / ours.decode_seconds) / (other.decode_tokens / other.decode_seconds)
        for ours, other in zip(mine, base, strict=True)
        if ours.decode_tokens > 0 and other.decode_tokens > 0
    ]
    return round(median(rates), 3) if rates else 0.0


def _outside(mine: Sequence[Timing], steps: int) -> float | None:
    """Milliseconds of decoding per step outside the forward pass; None for transformers, which does not report it."""
    known = [timing.outside_seconds for timing in mine if timing.outside_seconds is not None]
    return round(sum(known) / steps * 1e3, 3) if known and steps else None


def _latency(mine: Sequence[Timing]) -> dict[str, float]:
    """p50 and p95, in seconds, of the first token, the gap between tokens (0 within a burst) and the whole request."""
    measured = {
        "first_token_seconds": [timing.first_seconds for timing in mine],
        "between_tokens_seconds": [gap for timing in mine for gap in timing.gaps],
        "request_seconds": [timing.total_seconds for timing in mine],
    }
    found = {name: Percentiles.of(values) for name, values in measured.items()}
    return {f"{name}_{share}": round(getattr(found[name], share), 4) for name in measured for share in ("p50", "p95")}


def machine(target: Target, name: str) -> dict[str, Any]:
    """The target, and the machine that it ran on."""
    model = target.model
    return {
        "target": name,
        "backend": target.backend,
        "dtype": "as stored" if model is None else str(model.dtype).removeprefix("torch."),
        "device": str(target.device),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def tables(results: Mapping[str, Any]) -> Iterator[Table | str]:
    """The printed report: one line or table for each measurement."""
    yield _prompts_line(results["prompts"])
    if results["modes"]:
        yield _modes_table(results)
    if "concurrency" in results:
        found = results["concurrency"]
        yield (
            f"{found['requests_at_once']} requests at once: {found['tokens_per_second_at_once']:.1f} tokens/s; one "
            f"after the other: {found['tokens_per_second_one_after_the_other']:.1f}; ratio {found['ratio']:.2f}x "
            f"({found['prompts_read']['ratio']:.2f}x with the prompts already prefilled)"
        )


def _prompts_line(prompts: Mapping[str, Any]) -> str:
    lengths = prompts["prompt_tokens"]
    number = "1 prompt" if len(lengths) == 1 else f"{len(lengths)} prompts"
    parts = [f"{prompts['source']}: {number} of {min(lengths)} to {max(lengths)} tokens"]
    parts.append(f"answers to {prompts['warming']} more in the cache")
    parts.append(f"{prompts['left_out_as_too_long']} too long and left out")
    if prompts["truncated"]:
        parts.append(f"{prompts['truncated']} shortened by dropping their oldest messages after the system turn")
    if prompts["system_turn_cut_at_characters"]:
        parts.append(f"system turns cut at {prompts['system_turn_cut_at_characters']} characters")
    return "; ".join(parts)


def _modes_table(results: Mapping[str, Any]) -> Table:
    where = results["machine"]
    what = "rates without prefill; first token: p50, between tokens: p50/p95, whole: sum"
    title = f"greedy · {where['target']}, {where['dtype']}\n{what}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("mode", no_wrap=True)
    rates = ("tok/s", "vs\nplain", "vs gen-\nerate", "tok/\nstep", "ms/\nstep")
    for heading in (*rates, "first\ns", "between\nms", "whole\ns", "vs\nplain", "equal"):
        table.add_column(heading, justify="right")
    for mode in results["modes"]:
        same, total = mode["identical_outputs"]
        table.add_row(
            mode["name"],
            f"{mode['tokens_per_second']:.1f}",
            _times(mode["speedup_vs_plain"]),
            _times(mode["speedup_vs"]["generate"]) if "generate" in mode["speedup_vs"] else "",
            f"{mode['tokens_per_step']:.2f}",
            f"{mode['milliseconds_per_step']:.1f}",
            f"{mode['first_token_seconds_p50']:.2f}",
            "/".join(f"{mode[f'between_tokens_seconds_{share}'] * 1e3:.0f}" for share in ("p50", "p95")),
            f"{mode['request_seconds']:.1f}",
            _times(mode["request_speedup_vs_plain"]),
            f"{same}/{total}",
        )
    return table


def _times(ratio: float) -> str:
    """A speed-up in three digits or so, because the table has to fit into 80 columns."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"
