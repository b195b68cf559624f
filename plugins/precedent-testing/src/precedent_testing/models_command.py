"""`precedent models`: tries the architectures of the installed transformers, or lists the models on this machine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from precedent.cli.options import JsonOption, printable, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError

FAILED = 1
"""Exit status if an architecture crashed, or computed something else than plain forwards."""

commands = typer.Typer()


@commands.command(epilog="Example: precedent models qwen3_next jamba")
def models(
    ctx: typer.Context,
    model_types: Annotated[
        list[str] | None, typer.Argument(help="Model types of transformers, such as qwen3_next.", show_default=False)
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try every causal LM of the installed transformers.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="List the models of Ollama, LM Studio and the hub's cache on this machine.")
    ] = False,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="With --local: tokens whose KV cache counts as memory.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """List the models on this machine (--local), or try architectures on tiny random models.

    Random trees are scored and compared with plain forwards. Prints a table in Markdown. The exit status is 1 if one
    crashed or computed something else; a refusal, which names its reason, is no failure.
    """
    if [bool(model_types), sweep, local].count(True) != 1 or (context and not local):
        raise typer.BadParameter("give some model types, or --sweep for all of them, or --local [--context N]")
    if local:
        _list_local(ctx.obj, context, json)
        return
    from precedent_testing.sweep import CRASHED, try_architecture
    from precedent_testing.tiny_configs import causal_lm_types

    known, outcomes, progress = causal_lm_types(), [], ctx.obj
    assert isinstance(progress, Progress)
    if unknown := sorted(set(model_types or ()) - set(known)):
        raise ConfigError(f"transformers has no causal LM {unknown[0]!r}: model types are such as qwen3_next or llama")
    for model_type in model_types or known:
        progress.show(f"trying {model_type}")
        outcomes.append(try_architecture(model_type))
    progress.rest()
    counts = Counter(one.verdict for one in outcomes)
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".\n")
    typer.echo("| model type | verdict | distance | reason |\n|---|---|---|---|")
    for one in outcomes:
        distance = f"{one.distance:.0e}" if one.verdict.startswith("works") else ""
        typer.echo(f"| {one.model_type} | {one.verdict} | {distance} | {one.reason.replace('|', '/')} |")
    write_json(json, {"outcomes": [dataclasses.asdict(one) for one in outcomes]})
    for one in outcomes:
        if one.verdict == CRASHED:
            typer.echo(f"{one.model_type}: {one.reason}", err=True)
    if counts[CRASHED]:
        raise typer.Exit(FAILED)


def _list_local(progress: Progress, context: int | None, json: Path | None) -> None:
    from precedent_testing.local_models import local_models

    progress.show("reading the models' files")
    found = list(local_models(context))
    progress.rest()
    typer.echo(f"{len(found)} {'model' if len(found) == 1 else 'models'}.\n")
    typer.echo("| model | size | quantisation | back end | memory |\n|---|---|---|---|---|")
    for one in found:
        memory = "" if one.memory is None else f"{one.memory / 1e9:.2f} GB with {one.context:,} tokens"
        size, runs = (
            "" if one.size is None else f"{one.size / 1e9:.2f} GB",
            one.backend or f"no: {one.refusal}",
        )
        typer.echo(
            f"| {printable(one.name)} | {size} | {one.quantization} | {printable(runs).replace('|', '/')} | {memory} |"
        )
    write_json(json, {"models": [dataclasses.asdict(one) for one in found]})
