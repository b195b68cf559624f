"""`precedent replay`: measures what speculation would gain on recorded logs, without a language model."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from precedent.cli.options import (
    DEFAULT_TARGET,
    DeviceOption,
    DtypeOption,
    HtmlOption,
    JsonOption,
    LoopOption,
    write_json,
)
from precedent.cli.progress import Progress
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent_replay.settings import MeasuredSteps

MOST_SHOWN_TURNS = 40
"""Most turns shown on the HTML page."""

LogsArgument = Annotated[
    list[Path],
    typer.Argument(exists=True, dir_okay=False, help="Logs: OpenAI-format chats or LangSmith runs (JSONL, .gz)."),
]


commands = typer.Typer()


@commands.command(epilog="Example: precedent replay chats.jsonl --budget 16,32 --alpha 1,4,8 --json replay.json")
def replay(
    ctx: typer.Context,
    traces: LogsArgument,
    warm: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Logs whose answers every pool includes.")
    ] = None,
    pool: Annotated[
        str,
        typer.Option(help="Recorded answers to draft from: online (earlier ones), same-task, other-tasks, none."),
    ] = "online",
    budget: Annotated[str, typer.Option(help="Most nodes in a tree; or several limits: 16,32,64.")] = "32",
    one_path: Annotated[
        bool, typer.Option("--one-path", help="One path instead of a tree, as behind vLLM and llama.cpp.")
    ] = False,
    drafters: Annotated[str, typer.Option(help="Drafters to combine, separated by commas.")] = "recall,prompt",
    loop: LoopOption = None,
    baselines: Annotated[
        str | None,
        typer.Option(help="Baselines beyond prompt-lookup and suffix: suffix-tree, sglang, adapld. Default: all."),
    ] = None,
    alpha: Annotated[
        str, typer.Option(help="SuffixDecoding's draft length per matched token; or several: 1,4,8.")
    ] = "1",
    target: Annotated[
        str | None,
        typer.Option(help="Measure the step time of this model on this machine, and report its speed-up."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    curve: Annotated[
        str | None,
        typer.Option(
            help="Cost curves (step cost by number of tokens) to plan for: flat, gpu, cpu. "
            "Default: the measured curve of --target, else flat."
        ),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(
            help="Measure again without one part: a drafter, similarity, kinship, exact, anchors, holes, calibration "
            "or trust; all leaves out each in turn."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help=f"Hugging Face id or folder. Default: the tokenizer of --target, else of {DEFAULT_TARGET}."),
    ] = None,
    embedder: Annotated[
        str | None, typer.Option(help="sentence-transformers id or folder for recall; 'none' ignores similarity.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Measure only this many turns, from the first.")] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File of the groups to measure: one per line, or a JSON object of lists."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="The list to use from a JSON file of --groups.")] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Show nodes, drafting times, kinds of turns and all curves.")
    ] = False,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Compare estimated with observed acceptance.")
    ] = False,
    actions: Annotated[
        bool, typer.Option("--actions", help="Measure tool calls instead: how many could be predicted and run ahead.")
    ] = False,
    allow: Annotated[
        str | None,
        typer.Option(
            help="With --actions: tools that only read, separated by commas. Default: by name, as get_…, find_…"
        ),
    ] = None,
    tool_seconds: Annotated[
        float, typer.Option(min=0.0, help="With --actions: seconds that a tool is taken to need.")
    ] = 1.0,
    model_seconds: Annotated[
        float, typer.Option(min=0.0, help="With --actions: seconds that an answer of the model is taken to need.")
    ] = 1.0,
    html: HtmlOption = None,
    json: JsonOption = None,
) -> None:
    """Replay recorded chats: treat each recorded answer as the target's output and measure every drafter set on it."""
    progress: Progress = ctx.obj
    if actions:
        if warm or html or target or ablate or groups or loop:
            raise ConfigError(
                "--actions takes logs, --pool, --allow, --tool-seconds, --model-seconds, --embedder, --json"
            )
        from precedent_replay.actions import ActionSettings, replay_actions
        from precedent_replay.table import show_actions

        allowed = frozenset(_listed("--allow", allow)) if allow else frozenset()
        chosen = ActionSettings(pool, allowed, tool_seconds=tool_seconds, model_seconds=model_seconds, limit=limit)
        counted = replay_actions(traces, _embedder(embedder), chosen, progress.show).as_dict()
        progress.rest()
        show_actions(Console(), counted)
        write_json(json, counted)
        return
    progress.show("loading the tokenizer")
    from precedent.target.load.loading import load_tokenizer
    from precedent_replay.page import ShownTurns, replay_page
    from precedent_replay.run import replay as run_replay
    from precedent_replay.settings import IDEAS, MEASURED, Settings
    from precedent_replay.table import show, show_calibration

    names = _listed("--drafters", drafters)
    without = _listed("--ablate", ablate) if ablate else ()
    budgets = tuple(int(number) for number in _numbers("--budget", budget))
    curves = _listed("--curve", curve) if curve else ()
    asked = Settings(
        pool=pool,
        budgets=budgets,
        drafters=names,
        alphas=_numbers("--alpha", alpha),
        limit=limit,
        curves=curves or ("flat",),
        groups=_groups(groups, split),
        baselines=_listed("--baselines", baselines) if baselines else None,
        ablate=(*(names if len(names) > 1 else ()), *IDEAS) if without == ("all",) else without,
        one_path=one_path,
        loop=loop,
    )
    shown = ShownTurns(MOST_SHOWN_TURNS if html else 0)
    loaded = load_tokenizer(tokenizer or target or DEFAULT_TARGET)
    steps = _steps(progress, target, device, dtype, max(budgets))
    if steps is not None:  # first, so that the verdict's figures are planned for it
        asked = dataclasses.replace(asked, measured=steps, curves=(MEASURED, *curves))
    results = run_replay(traces, warm or (), loaded, _embedder(embedder), asked, progress.show, shown)
    found, reliability = results.as_dict(), results.reliability.as_dict()
    progress.rest()
    show(Console(), found, details=details)
    if calibration:
        show_calibration(Console(), reliability)
    if html:
        html.write_text(replay_page(found, shown, loaded), encoding="utf-8")
    write_json(json, found | ({"calibration": reliability} if calibration else {}))


def _steps(
    progress: Progress, target: str | None, device: str | None, dtype: str | None, most_nodes: int
) -> MeasuredSteps | None:
    """The target's step times on this machine; None without a target."""
    if target is None:
        if device or dtype:
            raise ConfigError("--device and --dtype need a target: give --target as well")
        return None
    from precedent.target.load.loading import load_target
    from precedent_replay.settings import MeasuredSteps

    progress.show(f"loading {target}")
    model, _ = load_target(target, device=device, dtype=dtype)
    return MeasuredSteps.of(model, target, most_nodes, partial(progress.show, f"measuring steps of {target}"))


def _listed(option: str, names: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not found:
        raise ConfigError(f"{option} is empty: see precedent replay --help for its values")
    return found


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers, for instance 16,32 or 1,4,8, not {text!r}") from error


def _groups(path: Path | None, split: str | None) -> frozenset[str]:
    """The groups to measure, empty for all."""
    if path is None:
        return frozenset()
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("{"):
        return frozenset(text.split("\n")) - {""}
    lists = {name: names for name, names in jsonlib.loads(text).items() if isinstance(names, list)}
    if split not in lists:
        raise ConfigError(f"--groups {path} holds several lists: choose one with --split: {', '.join(lists)}")
    return frozenset(lists[split])


def _embedder(name: str | None) -> Any:
    from precedent.cache import SentenceTransformerEmbedder
    from precedent.cache.embedder import default_model

    return None if name == "none" else SentenceTransformerEmbedder(name or default_model())
