"""`precedent bench`: wall clock on real prompts, one process, modes interleaved."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from precedent.cli.options import (
    DEFAULT_TARGET,
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    write_json,
)
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.cli.bench_modes import Contestant, Timing

MODES = ("plain", "generate", "prompt-lookup", "assisted", "ours")


def bench(
    traces: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="OpenAI-format chat traces (JSONL, .gz); default: the order desk."
        ),
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    draft_model: DraftModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    modes: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(MODES)}.")] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure.")] = 8,
    warm: Annotated[int, typer.Option(min=0, help="Other prompts whose answers fill the cache first.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 1200,
    json: JsonOption = None,
) -> None:
    """Compare plain decoding, transformers' generate, its prompt lookup and assisted generation, and Precedent."""
    chosen = _chosen_modes(modes, draft_model)
    from precedent.cli.bench_prompts import load_prompts
    from precedent.target.loading import load_target

    console = Console(stderr=True)
    with console.status(f"loading {target}"):
        model, tokenizer = load_target(target, device=device, dtype=dtype)
    warming, measured = load_prompts(traces, tokenizer, prompts, warm, max_prompt_tokens)
    with console.status("starting the engines"):
        contestants, warm_engine = _contestants(
            chosen, model, tokenizer, target, draft_model, device, dtype, max_tokens
        )
    for prompt in track(warming, "filling the cache", console=console):
        warm_engine(prompt)
    timings: dict[str, list[Timing]] = defaultdict(list)
    for number, prompt in enumerate(track(measured, "measuring", console=console)):
        for name in _rotated(chosen, number):
            timings[name].append(contestants[name](prompt))
    results = {"machine": _machine(model, target), "modes": [_summary(name, timings) for name in chosen]}
    Console().print(_table(results, len(measured)))
    if json:
        write_json(json, results)


def _chosen_modes(modes: str, draft_model: str | None) -> list[str]:
    """The modes asked for, `plain` always among them. Raises ConfigError for an unknown or impossible one."""
    chosen = [mode.strip() for mode in modes.split(",") if mode.strip()] or [
        mode for mode in MODES if mode != "assisted" or draft_model
    ]
    for mode in chosen:
        if mode not in MODES:
            raise ConfigError(f"there is no mode {mode!r}; choose of {', '.join(MODES)}")
    if "assisted" in chosen and not draft_model:
        raise ConfigError("mode 'assisted' needs --draft-model")
    return chosen if "plain" in chosen else ["plain", *chosen]


def _contestants(
    chosen: Sequence[str],
    model: Any,
    tokenizer: Any,
    name: str,
    draft_model: str | None,
    device: str | None,
    dtype: str | None,
    max_tokens: int,
) -> tuple[dict[str, Contestant], Contestant]:
    """Everybody who takes part, and the engine that fills the cache."""
    from precedent.cache import SpeculationCache
    from precedent.cli.bench_modes import PROMPT_LOOKUP, OurContestant, TransformersContestant
    from precedent.config import SpeculationConfig
    from precedent.engine import Engine
    from precedent.target.loading import load_draft, load_target

    untouched, _ = load_target(name, device=device, dtype=dtype)  # our engines pack the linears of theirs
    theirs: dict[str, dict[str, Any]] = {"generate": {}, "prompt-lookup": PROMPT_LOOKUP}
    if draft_model:
        theirs["assisted"] = {"assistant_model": load_draft(draft_model, untouched, tokenizer)}
    cache = SpeculationCache.open(None)
    draft = load_draft(draft_model, model, tokenizer) if draft_model else None

    def ours(**settings: Any) -> OurContestant:
        speculation = SpeculationConfig(**settings)
        engine = Engine(model, tokenizer, name=name, draft_model=draft, cache=cache, speculation=speculation)
        return OurContestant(engine, max_tokens)

    contestants: dict[str, Contestant] = {
        mode: TransformersContestant(untouched, max_tokens, **theirs[mode]) for mode in chosen if mode in theirs
    }
    contestants["plain"] = ours(enabled=False, write_back=False)
    contestants["ours"] = ours(write_back=False)
    return contestants, ours()


def _rotated(names: Sequence[str], number: int) -> list[str]:
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _summary(name: str, timings: Mapping[str, Sequence[Timing]]) -> dict[str, Any]:
    """One mode's figures; speed-up is the median over prompts of the ratio to plain."""
    mine, plain = timings[name], timings["plain"]
    tokens, steps = sum(t.decode_tokens for t in mine), sum(t.steps for t in mine)
    seconds = sum(t.decode_seconds for t in mine)
    rates = [
        (ours.decode_tokens / ours.decode_seconds) / (base.decode_tokens / base.decode_seconds)
        for ours, base in zip(mine, plain, strict=True)
        if ours.decode_tokens > 0 and base.decode_tokens > 0
    ]
    same = sum(ours.token_ids == base.token_ids for ours, base in zip(mine, plain, strict=True))
    return {
        "name": name,
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "speedup_vs_plain": round(median(rates), 3) if rates else 0.0,
        "tokens_per_step": round(tokens / steps, 3) if steps else 0.0,
        "milliseconds_per_step": round(seconds / steps * 1e3, 2) if steps else 0.0,
        "first_token_seconds_p50": round(median(t.first_seconds for t in mine), 3),
        "request_seconds_p50": round(median(t.total_seconds for t in mine), 3),
        "identical_outputs": [same, len(mine)],
    }


def _machine(model: Any, target: str) -> dict[str, Any]:
    import torch

    return {
        "target": target,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _table(results: Mapping[str, Any], prompts: int) -> Table:
    machine = results["machine"]
    table = Table(title=f"{prompts} prompts, greedy, decode only · {machine['target']}, {machine['dtype']}")
    table.add_column("mode")
    for heading in ("tok/s", "vs\nplain", "tok/\nstep", "ms/\nstep", "first s", "request s", "equal"):
        table.add_column(heading, justify="right")
    for mode in results["modes"]:
        same, total = mode["identical_outputs"]
        table.add_row(
            mode["name"],
            f"{mode['tokens_per_second']:.1f}",
            f"{mode['speedup_vs_plain']:.2f}x",
            f"{mode['tokens_per_step']:.2f}",
            f"{mode['milliseconds_per_step']:.1f}",
            f"{mode['first_token_seconds_p50']:.2f}",
            f"{mode['request_seconds_p50']:.2f}",
            f"{same}/{total}",
        )
    return table
