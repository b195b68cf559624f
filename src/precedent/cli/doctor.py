"""`precedent doctor`: what will work with a model, and why not, without loading its weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precedent.cli.options import DEFAULT_TARGET, DeviceOption, JsonOption, write_json
from precedent.cli.progress import Progress

if TYPE_CHECKING:
    from precedent.cli.doctor_checks import Finding

UNUSABLE = 1
"""Exit status where the model cannot be used."""

STYLES = {"yes": "green", "no": "red", "note": "yellow"}


def doctor(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Hugging Face id or folder.")] = DEFAULT_TARGET,
    draft_model: Annotated[
        str | None, typer.Option(help="A draft model to go with it: does its tokenizer fit?", show_default=False)
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Look at a model's files: attention, chat template, tools, draft model, memory.

    Exit status 0 if the model can be used, 1 if not, 2 if there is no such model.
    """
    progress: Progress = ctx.obj
    progress.show(f"looking at {model}")
    from precedent.cli.doctor_checks import examine_files

    findings = examine_files(model, draft_model, device)
    progress.rest()
    usable = all(one.state != "no" for one in findings if one.needed)
    _print(findings)
    typer.echo(f"{model} {'can' if usable else 'cannot'} be used")
    if json:
        write_json(json, {"model": model, "usable": usable, "findings": [dataclasses.asdict(one) for one in findings]})
    if not usable:
        raise typer.Exit(UNUSABLE)


def _print(findings: list[Finding]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("check", "works", "finding"):
        table.add_column(column, overflow="fold")
    for one in findings:
        table.add_row(one.check, Text(one.state, STYLES[one.state]), Text(one.finding))
    Console().print(table)
