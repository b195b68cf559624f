"""`precedent bench`: measures wall-clock time on real prompts, in one process, with the modes interleaved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from precedent.cli.options import (
    DEFAULT_TARGET,
    ChatTemplateOption,
    CudaGraphsOption,
    DeviceOption,
    DraftDeviceOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    LoopOption,
    TargetOption,
    write_json,
)
from precedent.cli.progress import Progress
from precedent.drafters.kinds import DRAFT_MODEL, kind_of
from precedent.errors import ConfigError
from precedent_replay.bench_report import machine, summary, tables

if TYPE_CHECKING:
    from precedent_replay.bench_lineup import Lineup
    from precedent_replay.bench_modes import Timing
    from precedent_replay.bench_prompts import PromptSet

STANDARD_MODES = ("plain", "generate", "prompt-lookup", "assisted", "ours")
MODES = (*STANDARD_MODES, "ours-cold", "adversarial", "null", "oracle")
INFORMED_MODES = ("adversarial", "oracle")
"""Modes that need the plain answers beforehand."""


commands = typer.Typer()


@commands.command(epilog="Example: precedent bench --json bench.json")
def bench(
    ctx: typer.Context,
    traces: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="OpenAI-format chat traces (JSONL, .gz). Default: the order desk.",
        ),
    ] = None,
    topics: Annotated[
        bool,
        typer.Option("--topics", help="Measure questions on unrelated topics instead."),
    ] = False,
    target: TargetOption = DEFAULT_TARGET,
    draft_model: DraftModelOption = None,
    draft_device: DraftDeviceOption = None,
    loop: LoopOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat_template: ChatTemplateOption = None,
    cuda_graphs: CudaGraphsOption = False,
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
    conversation: Annotated[
        bool, typer.Option("--conversation", help="Measure the time to the first token in a conversation of 10 turns.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Compare plain decoding, transformers' generate, its prompt lookup and assisted generation, and Precedent.

    Extra modes: ours-cold (empty cache), adversarial (wrong answers in it), null (no proposals), oracle (perfect ones).
    With --concurrency or --conversation, only the modes that --modes names are measured.
    """
    chosen = _chosen_modes(modes, draft_model, only_named=bool(concurrency) or conversation)
    if not draft_model and draft_device is not None:
        raise ConfigError("--draft-device needs a draft model: give --draft-model as well")
    if traces is not None and topics:
        raise ConfigError("--traces and --topics both choose the prompts: give one of them")
    if concurrency == 1 or concurrency > prompts:
        raise ConfigError(
            f"--concurrency {concurrency} is impossible: it needs 2 or more, and at least as many --prompts ({prompts})"
        )
    from precedent_replay.bench_lineup import Lineup

    progress: Progress = ctx.obj
    progress.show(f"loading {target}")
    how: dict[str, Any] = {"draft_device": draft_device, "loop": loop, "cuda_graphs": cuda_graphs}
    how["chat_template"] = chat_template
    with closing(Lineup(target, draft_model, device, dtype, max_tokens, **how)) as lineup:
        asked = _prompts(lineup, traces, topics, prompts, warm, max_prompt_tokens, truncate)
        _fill(lineup, asked, progress)
        results: dict[str, Any] = {"machine": machine(lineup.model, target), "prompts": asked.as_dict()}
        results["modes"] = _measured_modes(lineup, chosen, asked, progress) if chosen else []
        if concurrency:
            results["concurrency"] = _concurrency(lineup, concurrency, asked, progress)
        if conversation:
            results["conversation"] = _conversation(lineup, traces, progress)
    progress.rest()
    for shown in tables(results):
        Console().print(shown)
    if json:
        write_json(json, results)


def _chosen_modes(modes: str, draft_model: str | None, *, only_named: bool = False) -> list[str]:
    """The modes to measure, always with `plain`. Raises ConfigError for an unknown or impossible mode."""
    named = [mode.strip() for mode in modes.split(",") if mode.strip()]
    if not named and only_named:
        return []
    if named in ([], ["all"]):
        assisted = draft_model is not None and not _reads_its_target(draft_model)
        named = [mode for mode in (MODES if named else STANDARD_MODES) if mode != "assisted" or assisted]
    for mode in named:
        if mode not in MODES:
            raise ConfigError(f"there is no mode {mode!r}; choose from {', '.join(MODES)}")
    if "assisted" in named and not draft_model:
        raise ConfigError("mode 'assisted' needs --draft-model")
    return list(dict.fromkeys(named if "plain" in named else ["plain", *named]))


def _reads_its_target(draft_model: str) -> bool:
    """Whether a name is the folder of a draft of another kind than a model."""
    kind = kind_of(Path(draft_model).expanduser())
    return kind is not None and kind.name != DRAFT_MODEL


def _prompts(
    lineup: Lineup, traces: Path | None, topics: bool, prompts: int, warm: int, longest: int, truncate: bool
) -> PromptSet:
    from precedent_replay.bench_prompts import order_desk_prompts, topic_prompts, trace_prompts

    if traces is not None:
        return trace_prompts(traces, lineup.tokenizer, prompts, warm, longest, truncate=truncate)
    return (topic_prompts if topics else order_desk_prompts)(lineup.tokenizer, prompts, warm)


def _fill(lineup: Lineup, asked: PromptSet, progress: Progress) -> None:
    """Answer the warming prompts, to fill the cache that `ours` drafts from."""
    warm_engine = lineup.ours(lineup.cache, write_back=True)
    for prompt in progress.each(asked.warming, "filling the cache", len(asked.warming)):
        warm_engine(prompt)
    warm_engine.engine.close()


def _measured_modes(
    lineup: Lineup, chosen: Sequence[str], asked: PromptSet, progress: Progress
) -> list[dict[str, Any]]:
    """Let every mode answer every prompt; the mode that starts changes with each prompt."""
    progress.show("starting the engines")
    informed = any(mode in INFORMED_MODES for mode in chosen)
    contestants = lineup.contestants(chosen, lineup.plain_answers(asked.measured) if informed else {})
    timings: dict[str, list[Timing]] = defaultdict(list)
    for number, prompt in enumerate(asked.measured):
        for name in _rotated(chosen, number):
            progress.show("measuring", number, len(asked.measured), name)
            timings[name].append(contestants[name](prompt))
    return [summary(name, timings) for name in chosen]


def _rotated(names: Sequence[str], number: int) -> list[str]:
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _concurrency(lineup: Lineup, number: int, asked: PromptSet, progress: Progress) -> dict[str, Any]:
    from precedent_replay.bench_scenarios import concurrency

    sides = [lineup.ours(lineup.cache) for _ in range(2)]
    return concurrency(number, sides[0], sides[1], asked.measured, _counting(progress, f"{number} at once"))


def _conversation(lineup: Lineup, traces: Path | None, progress: Progress) -> dict[str, Any]:
    from precedent_replay.bench_prompts import TURNS, conversation_turns
    from precedent_replay.bench_scenarios import conversation

    turns, tools = conversation_turns(traces, TURNS)
    return conversation(lineup.ours(enabled=False), turns, tools, _counting(progress, "conversation"))


def _counting(progress: Progress, what: str) -> Callable[[Sequence[Any]], Iterator[Any]]:
    return lambda items: progress.each(items, what, len(items))
