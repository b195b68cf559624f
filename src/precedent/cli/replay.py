"""`precedent replay`: what would speculation gain on these logs? No language model takes part."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from precedent.cli.options import DEFAULT_TARGET, DeviceOption, DtypeOption, HtmlOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.replay.settings import MeasuredSteps, Settings

MOST_SHOWN_TURNS = 40
"""Turns on an HTML page."""

LogsArgument = Annotated[
    list[Path],
    typer.Argument(exists=True, dir_okay=False, help="Logs: OpenAI-format chats or LangSmith runs (JSONL, .gz)."),
]


def replay(
    ctx: typer.Context,
    traces: LogsArgument,
    warm: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Logs whose answers are in every pool.")
    ] = None,
    pool: Annotated[
        str, typer.Option(help="What a turn may see: online (earlier runs), same-task, other-tasks, none.")
    ] = "online",
    budget: Annotated[str, typer.Option(help="Most nodes of a tree; several: 16,32,64.")] = "32",
    drafters: Annotated[str, typer.Option(help="Drafters to combine, comma-separated.")] = "recall,prompt",
    baselines: Annotated[
        str | None, typer.Option(help="Beside prompt-lookup and suffix: suffix-tree, arctic; by default all installed.")
    ] = None,
    alpha: Annotated[str, typer.Option(help="Draft lengths of the baseline SuffixDecoding, per matched token.")] = "1",
    target: Annotated[
        str | None,
        typer.Option(help="Measure here what a step of this model costs, and say how much faster it would be."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    curve: Annotated[
        str | None,
        typer.Option(
            help="What a step of so many tokens costs: flat, gpu, cpu; planned once for each. "
            "By default as measured of --target, or flat."
        ),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(
            help="Measure without one idea: a drafter, similarity, exact, anchors, holes, calibration; or each: all."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help=f"Hugging Face id or folder; by default the target's, or {DEFAULT_TARGET}'s."),
    ] = None,
    embedder: Annotated[
        str | None, typer.Option(help="sentence-transformers id or folder for recall; 'none' leaves similarity out.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Measure only the first so many turns.")] = None,
    groups: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Groups to measure: one per line, or lists in a JSON object."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which list of a JSON file of --groups.")] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Show nodes, drafting times, kinds of turns and every curve.")
    ] = False,
    calibration: Annotated[bool, typer.Option("--calibration", help="Show how true the estimates are.")] = False,
    html: HtmlOption = None,
    svg: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Write the page's pictures into this folder.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Replay recorded chats: each recorded answer is taken as the target's, and every drafter set is measured on it."""
    progress: Progress = ctx.obj
    progress.show("loading the tokenizer")
    from precedent.cli.replay_table import show, show_calibration
    from precedent.replay.ablation import IDEAS
    from precedent.replay.page import ShownTurns, pictures_of, replay_page
    from precedent.replay.run import Settings
    from precedent.replay.run import replay as run_replay
    from precedent.target.load.loading import load_tokenizer

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
    )
    shown = ShownTurns(MOST_SHOWN_TURNS if html or svg else 0)
    loaded = load_tokenizer(tokenizer or target or DEFAULT_TARGET)
    settings = _with_steps(asked, curves, _steps(progress, target, device, dtype, max(budgets)))
    results = run_replay(
        traces, warm or (), loaded, _embedder(embedder), settings,
        progress=progress.show, observer=shown,
    )  # fmt: skip
    found, reliability = results.as_dict(), results.reliability.as_dict()
    progress.rest()
    show(Console(), found, details=details)
    if calibration:
        show_calibration(Console(), reliability)
    if html:
        html.write_text(replay_page(found, shown, loaded), encoding="utf-8")
    for name, picture in pictures_of(found, shown, loaded).items() if svg else ():
        (svg / name).write_text(picture, encoding="utf-8")  # type: ignore[operator]  # there are none without a folder
    if json:
        write_json(json, found | ({"calibration": reliability} if calibration else {}))


def _steps(
    progress: Progress, target: str | None, device: str | None, dtype: str | None, most_nodes: int
) -> MeasuredSteps | None:
    """What steps of the target take here, None without one."""
    if target is None:
        if device or dtype:
            raise ConfigError("--device and --dtype say how --target runs: give it as well")
        return None
    from precedent.replay.measured_steps import measured_steps
    from precedent.target.load.loading import load_target

    progress.show(f"loading {target}")
    model, _ = load_target(target, device=device, dtype=dtype)
    return measured_steps(model, target, most_nodes, partial(progress.show, f"measuring steps of {target}"))


def _with_steps(asked: Settings, curves: tuple[str, ...], steps: MeasuredSteps | None) -> Settings:
    """The settings with the measured curve before all others: what the verdict tells of was planned for it."""
    if steps is None:
        return asked
    from precedent.replay.settings import MEASURED

    return dataclasses.replace(asked, measured=steps, curves=(MEASURED, *curves))


def _listed(option: str, names: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not found:
        raise ConfigError(f"{option} names none: see precedent replay --help")
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
        raise ConfigError(f"--groups {path} holds several lists: choose one by --split {', '.join(lists)}")
    return frozenset(lists[split])


def _embedder(name: str | None) -> Any:
    from precedent.cache.search.embedder import SentenceTransformerEmbedder, default_model

    return None if name == "none" else SentenceTransformerEmbedder(name or default_model())
