"""`precedent bench`: measures wall-clock time on real prompts, in one process, with the modes interleaved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from precedent.cli import options
from precedent.cli.progress import Progress
from precedent.drafters.registry import DRAFT_MODEL, kind_of
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.engine.options import EngineOptions
    from precedent_replay.bench_lineup import Lineup, Timing
    from precedent_replay.bench_prompts import PromptSet

STANDARD_MODES = ("plain", "generate", "prompt-lookup", "assisted", "ours")
MODES = (*STANDARD_MODES, "ours-cold", "adversarial", "null", "oracle")

commands = typer.Typer()


@commands.command(epilog="Example: precedent bench --json bench.json")
def bench(
    ctx: typer.Context,
    traces: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="OpenAI-format chat traces (JSONL, .gz). Default: the order desk."
        ),
    ] = None,
    topics: Annotated[bool, typer.Option("--topics", help="Measure questions on unrelated topics instead.")] = False,
    target: options.TargetOption = options.DEFAULT_TARGET,
    draft_model: options.DraftModelOption = None,
    draft_device: options.DraftDeviceOption = None,
    loop: options.LoopOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    quantization: options.QuantizationOption = None,
    accurate: options.AccurateOption = False,
    backend: options.BackendOption = None,
    n_gpu_layers: options.GpuLayersOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With --rows: time the steps of Precedent and of llama.cpp in turns.")
    ] = False,
    chat_template: options.ChatTemplateOption = None,
    cuda_graphs: options.CudaGraphsOption = False,
    modes: Annotated[
        str,
        typer.Option(help=f"Comma-separated modes ({', '.join(MODES)}), or all. Default: {', '.join(STANDARD_MODES)}."),
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure.")] = 8,
    warm: Annotated[int, typer.Option(min=0, help="Other prompts to answer first, to fill the cache.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave out longer prompts of --traces.")] = 1200,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Shorten them instead: drop their oldest messages after the system message."),
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=0, metavar="N", help="Compare N requests at once with one after the other.")
    ] = 0,
    rows: Annotated[
        str, typer.Option(metavar="N,…", help="Measure only the time of a step with so many rows, and of prompts.")
    ] = "",
    context: Annotated[int, typer.Option(min=1, help="With --rows: tokens before the step, and of a prompt.")] = 640,
    json: options.JsonOption = None,
) -> None:
    """Compare plain decoding, transformers' generate, its prompt lookup and assisted generation, and Precedent.

    Extra modes: ours-cold (empty cache), adversarial (wrong answers in it), null (no proposals), oracle (perfect ones).
    With --concurrency, only the modes that --modes names are measured.
    """
    from precedent.engine.options import EngineOptions

    if rows:
        if traces or topics or modes or concurrency or draft_model:
            raise ConfigError("--rows times steps alone: give it --target and how it is loaded, --context and --json")
        loading = EngineOptions(
            device=device, dtype=dtype, quantization=quantization, accurate=accurate, backend=backend,
            n_gpu_layers=n_gpu_layers, cuda_graphs=cuda_graphs,
        )  # fmt: skip
        _measure_rows(ctx.obj, _row_counts(rows), context, target, loading, json, compare=compare)
        return
    if compare:
        raise ConfigError("--compare times steps alone: give --rows as well")
    chosen = _chosen_modes(modes, draft_model, only_named=bool(concurrency))
    if not draft_model and draft_device is not None:
        raise ConfigError("--draft-device needs a draft model: give --draft-model as well")
    if traces is not None and topics:
        raise ConfigError("--traces and --topics both choose the prompts: give one of them")
    if concurrency == 1 or concurrency > prompts:
        raise ConfigError(
            f"--concurrency {concurrency} is impossible: it needs 2 or more, and at least as many --prompts ({prompts})"
        )
    from precedent_replay import bench_lineup, bench_prompts, bench_report

    progress: Progress = ctx.obj
    progress.show(f"loading {target}")
    given = EngineOptions(
        draft_model=draft_model, device=device, draft_device=draft_device, dtype=dtype, quantization=quantization,
        accurate=accurate, backend=backend, n_gpu_layers=n_gpu_layers, chat_template=chat_template,
        cuda_graphs=cuda_graphs, loop=loop,
    )  # fmt: skip
    with closing(bench_lineup.Lineup(target, given, max_tokens)) as lineup:
        if lineup.target.model is None and not modes:
            chosen = [mode for mode in chosen if mode in bench_lineup.OURS]
        if traces is not None:
            sizes = (prompts, warm, max_prompt_tokens)
            asked = bench_prompts.trace_prompts(traces, lineup.tokenizer, *sizes, truncate=truncate)
        else:
            prompts_of = bench_prompts.topic_prompts if topics else bench_prompts.order_desk_prompts
            asked = prompts_of(lineup.tokenizer, prompts, warm)
        with closing(lineup.ours(lineup.cache, write_back=True).engine) as filling:
            filler = bench_lineup.OurContestant(filling, max_tokens)
            for prompt in progress.each(asked.warming, "filling the cache", len(asked.warming)):
                filler(prompt)
        results: dict[str, Any] = {"machine": bench_report.machine(lineup.target, target), "prompts": asked.as_dict()}
        timings = _measured(lineup, chosen, asked, progress) if chosen else {}
        results["modes"] = [bench_report.summary(name, timings) for name in timings]
        if concurrency:
            alone, together = (lineup.ours(lineup.cache) for _ in range(2))
            count = lambda groups: progress.each(groups, f"{concurrency} at once", len(groups))  # noqa: E731
            results["concurrency"] = bench_lineup.concurrency(concurrency, alone, together, asked.measured, count)
    progress.rest()
    for shown in bench_report.tables(results):
        Console().print(shown)
    options.write_json(json, results)


def _measure_rows(
    progress: Progress,
    rows: Sequence[int],
    context: int,
    name: str,
    loading: EngineOptions,
    json: Path | None,
    *,
    compare: bool,
) -> None:
    """Time steps by number of rows, and prompts; of both back ends with `compare`."""
    from precedent.engine.loading import loaded_target
    from precedent.target.model import target_of
    from precedent_replay.step_times import bound, compared, table

    progress.show(f"loading {name}")
    ours, theirs = replace(loading, backend=None, n_gpu_layers=None), replace(loading, backend="llama.cpp")
    loaded = [loaded_target(name, None, each).model for each in ([ours, theirs] if compare else [loading])]
    targets = [target_of(each, cuda_graphs=loading.cuda_graphs) for each in loaded]
    found = compared(targets, name, rows, context, partial(progress.show, "measuring"))
    progress.rest()
    for each in found:
        Console().print(table(each))
        if compare:
            Console().print(bound(each))
    options.write_json(json, {"backends": found} if compare else found[0])


def _row_counts(text: str) -> list[int]:
    """The numbers of rows, ascending. Raises ConfigError for anything that is not a positive integer."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--rows takes numbers of rows from 1 on, for instance 1,2,4,8,16,32, not {text!r}")
    return sorted({int(part) for part in parts})


def _chosen_modes(modes: str, draft_model: str | None, *, only_named: bool = False) -> list[str]:
    """The modes to measure, always with `plain`. Raises ConfigError for an unknown or impossible mode."""
    named = [mode.strip() for mode in modes.split(",") if mode.strip()]
    if not named and only_named:
        return []
    if named in ([], ["all"]):
        kind = None if draft_model is None else kind_of(Path(draft_model).expanduser())
        assisted = draft_model is not None and (kind is None or kind.name == DRAFT_MODEL)
        named = [mode for mode in (MODES if named else STANDARD_MODES) if mode != "assisted" or assisted]
    for mode in named:
        if mode not in MODES:
            raise ConfigError(f"there is no mode {mode!r}; choose from {', '.join(MODES)}")
    if "assisted" in named and not draft_model:
        raise ConfigError("mode 'assisted' needs --draft-model")
    return list(dict.fromkeys(named if "plain" in named else ["plain", *named]))


def _measured(lineup: Lineup, chosen: Sequence[str], asked: PromptSet, progress: Progress) -> dict[str, list[Timing]]:
    """Let every mode answer every prompt; the mode that starts changes with each prompt."""
    progress.show("starting the engines")
    informed = "adversarial" in chosen or "oracle" in chosen
    contestants = lineup.contestants(chosen, lineup.plain_answers(asked.measured) if informed else {})
    timings: dict[str, list[Timing]] = defaultdict(list, {name: [] for name in chosen})
    for number, prompt in enumerate(asked.measured):
        shift = number % len(chosen)
        for name in (*chosen[shift:], *chosen[:shift]):
            progress.show("measuring", number, len(asked.measured), name)
            timings[name].append(contestants[name](prompt))
    return timings
