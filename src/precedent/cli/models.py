"""`precedent models`: tries the architectures of the installed transformers, and says which can be a target model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from precedent.cli.options import JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.testing.sweep import Outcome

BEGIN, END = "<!-- sweep -->", "<!-- /sweep -->"
"""What the table stands between in a Markdown file."""

FAILED = 1
"""Exit status if an architecture crashed, or computed something else than plain forwards."""


def models(
    ctx: typer.Context,
    model_types: Annotated[
        list[str] | None, typer.Argument(help="Model types of transformers, such as qwen3_next.", show_default=False)
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try every causal LM of the installed transformers.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, writable=True, help=f"Put the table into this file, after {BEGIN}."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Build a tiny random model of each architecture, score random trees with it and compare with plain forwards.

    The exit status is 1 if one crashed or computed something else; a refusal, which names its reason, is no failure.
    """
    progress: Progress = ctx.obj
    outcomes = list(_outcomes(_asked(model_types or (), sweep=sweep), progress))
    progress.rest()
    table = table_of(outcomes)
    if write is None:
        typer.echo(table)
    else:
        write.write_text(with_table(write.read_text(encoding="utf-8"), table), encoding="utf-8")
    if json:
        write_json(json, {"outcomes": [dataclasses.asdict(one) for one in outcomes]})
    crashed = [one for one in outcomes if one.verdict == "crashed"]
    for one in crashed:
        typer.echo(f"{one.model_type}: {one.reason}", err=True)
    if crashed:
        raise typer.Exit(FAILED)


def _asked(model_types: Sequence[str], *, sweep: bool) -> list[str]:
    if sweep == bool(model_types):
        raise typer.BadParameter("give some model types, or --sweep for all of them")
    from precedent.testing.tiny_configs import causal_lm_types

    known = causal_lm_types()
    unknown = sorted(set(model_types) - set(known))
    if unknown:
        raise ConfigError(f"transformers has no causal LM {unknown[0]!r}: model types are such as qwen3_next or llama")
    return list(model_types) or known


def _outcomes(model_types: Iterable[str], progress: Progress) -> Iterator[Outcome]:
    from precedent.testing.sweep import try_architecture

    for model_type in model_types:
        progress.show(f"trying {model_type}")
        yield try_architecture(model_type)


def table_of(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown: how many of each verdict, then a row for each."""
    counts = Counter(one.verdict for one in outcomes)
    lines = [", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".", ""]
    lines += ["| model type | verdict | distance | reason |", "|---|---|---|---|"]
    for one in outcomes:
        distance = f"{one.distance:.0e}" if one.verdict.startswith("works") else ""
        lines.append(f"| {one.model_type} | {one.verdict} | {distance} | {one.reason.replace('|', '/')} |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """A page with the table in place of its old one. Raises ConfigError for a page without the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no place for the table: put {BEGIN} and {END} where it belongs")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"
