"""`precedent replay`: what would speculation gain on these logs? No language model takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from precedent.cli.options import DEFAULT_TARGET, JsonOption, write_json
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.replay.run import Replay

MOST_SHOWN_TURNS = 40
"""Turns on an HTML page."""

LogsArgument = Annotated[
    list[Path],
    typer.Argument(exists=True, dir_okay=False, help="Logs: OpenAI-format chats or LangSmith runs (JSONL, .gz)."),
]


def replay(
    traces: LogsArgument,
    warm: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Logs whose answers are in every pool.")
    ] = None,
    pool: Annotated[
        str, typer.Option(help="What a turn may see: online (earlier runs), same-task, other-tasks, none.")
    ] = "online",
    budget: Annotated[int, typer.Option(help="Most nodes of a tree.")] = 32,
    drafters: Annotated[str, typer.Option(help="Drafters to combine, comma-separated.")] = "recall,prompt",
    alpha: Annotated[str, typer.Option(help="Draft lengths of the baseline SuffixDecoding, per matched token.")] = "1",
    curve: Annotated[str, typer.Option(help="What a step of so many tokens costs: flat, cpu.")] = "flat",
    tokenizer: Annotated[str, typer.Option(help="Hugging Face id or folder of the tokenizer.")] = DEFAULT_TARGET,
    embedder: Annotated[
        str | None, typer.Option(help="sentence-transformers id or folder for recall; 'none' leaves similarity out.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Measure only the first so many turns.")] = None,
    groups: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the groups to measure, one per line.")
    ] = None,
    calibration: Annotated[bool, typer.Option("--calibration", help="Show how true the estimates are.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with tokens coloured by source.")] = None,
    json: JsonOption = None,
) -> None:
    """Replay recorded chats: each recorded answer is taken as the target's, and every drafter set is measured on it."""
    from precedent.replay.page import ShownTurns, write_page
    from precedent.replay.run import Settings
    from precedent.replay.run import replay as run_replay
    from precedent.target.loading import load_tokenizer

    settings = Settings(
        pool=pool,
        budget=budget,
        drafters=tuple(_listed(drafters)),
        alphas=tuple(_numbers(alpha)),
        limit=limit,
        curve=curve,
        groups=frozenset(groups.read_text(encoding="utf-8").split("\n")) - {""} if groups else frozenset(),
    )
    shown = ShownTurns(MOST_SHOWN_TURNS if html else 0)
    loaded = load_tokenizer(tokenizer)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("reading")
        results = run_replay(
            traces, warm or (), loaded, _embedder(embedder), settings,
            progress=lambda what, done: progress.update(task, description=f"{what}: {done}"),
            observe=shown,
        )  # fmt: skip
    _show(Console(), results, settings.curve, calibration)
    if html:
        write_page(html, results.as_dict(), shown, loaded)
    if json:
        write_json(json, results.as_dict() | ({"calibration": _reliability(results)} if calibration else {}))


def _listed(names: str) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise ConfigError("--drafters names none: give for instance recall,prompt")
    return found


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--alpha takes numbers, for instance 1,4,8, not {text!r}") from error


def _embedder(name: str | None) -> Any:
    from precedent.cache.embedder import SentenceTransformerEmbedder, default_model

    return None if name == "none" else SentenceTransformerEmbedder(name or default_model())


def _show(console: Console, results: Replay, curve: str, calibration: bool) -> None:
    found = results.as_dict()
    table = Table(title=f"{found['turns']} turns, {found['tokens']} tokens")
    table.add_column("drafters", no_wrap=True)
    for heading in ("tok/\nstep", "tool\ncalls", "text", "nodes/\nstep", f"tok/cost\n({curve})", "µs/\nstep", "p99"):
        table.add_column(heading, justify="right")
    drafters: Sequence[Mapping[str, Any]] = found["drafters"]  # type: ignore[assignment]  # made by Report.as_dict
    for row in drafters:
        table.add_row(
            row["name"],
            *(f"{row[key]:.2f}" for key in ("tokens_per_step", "tokens_per_step_tool_calls", "tokens_per_step_text")),
            f"{row['draft_tokens_per_step']:.1f}",
            f"{row['tokens_per_plain_step_time']:.2f}",
            f"{row['microseconds_per_step']:.0f}",
            f"{row['microseconds_per_step_p99']:.0f}",
        )
    console.print(table)
    if calibration:
        _show_calibration(console, _reliability(results))


def _reliability(results: Replay) -> dict[str, Any]:
    return results.reliability.as_dict()


def _show_calibration(console: Console, reliability: Mapping[str, Any]) -> None:
    """Predicted against observed acceptance, in tenths."""
    table = Table(title=f"calibration: Brier score {reliability['brier_score']:.4f}")
    for heading in ("predicted", "observed", "candidates"):
        table.add_column(heading, justify="right")
    for row in reliability["bins"]:
        table.add_row(f"{row['predicted']:.3f}", f"{row['observed']:.3f}", str(row["candidates"]))
    console.print(table)
