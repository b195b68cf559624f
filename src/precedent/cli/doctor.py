"""`precedent doctor`: says what works with a model and what does not, without loading its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precedent.cli.options import DEFAULT_TARGET, ChatTemplateOption, DeviceOption, JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ModelLoadError

if TYPE_CHECKING:
    from precedent.cli.doctor_checks import Finding

UNUSABLE = 1
"""Exit status if the model, or the model with the given draft model, cannot be used."""

DRAFT_MODEL = "draft model"
"""The check that concerns the draft model, not the model itself."""

STYLES = {"yes": "green", "no": "red", "note": "yellow"}


def doctor(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Hugging Face id or folder.")] = DEFAULT_TARGET,
    draft_model: Annotated[
        str | None, typer.Option(help="Check whether this draft model fits the model.", show_default=False)
    ] = None,
    device: DeviceOption = None,
    chat_template: ChatTemplateOption = None,
    json: JsonOption = None,
) -> None:
    """Check a model from its files alone: attention, context, memory, chat template, tools, draft model.

    The exit status is 0 if the model (with its draft model, if given) can be used, 1 if not, 2 if it does not exist.
    """
    progress: Progress = ctx.obj
    progress.show(f"checking {model}")
    from precedent.cli.doctor_checks import Finding, examine_files

    try:
        findings = list(examine_files(model, draft_model, device, chat_template))
    except ModelLoadError as error:
        if not Path(model).expanduser().exists():
            raise
        findings = [Finding("files", "no", str(error), needed=True)]
    progress.rest()
    failed = {one.check for one in findings if one.needed and one.state == "no"}
    _print(findings)
    typer.echo(_conclusion(model, draft_model, failed))
    found = {"model": model, "usable": not failed, "model_usable": failed <= {DRAFT_MODEL}}
    write_json(json, found | {"findings": [dataclasses.asdict(one) for one in findings]})
    if failed:
        raise typer.Exit(UNUSABLE)


def _conclusion(model: str, draft_model: str | None, failed: set[str]) -> str:
    """What can be used: a model stays usable even if the draft model does not fit it."""
    if failed == {DRAFT_MODEL}:
        return f"{model} can be used, but not with the draft model {draft_model}"
    return f"{model} cannot be used: {', '.join(sorted(failed))}" if failed else f"{model} can be used"


def _print(findings: list[Finding]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("check", "works", "finding"):
        table.add_column(column, overflow="fold")
    for one in findings:
        table.add_row(one.check, Text(one.state, STYLES[one.state]), Text(one.finding))
    Console().print(table)
