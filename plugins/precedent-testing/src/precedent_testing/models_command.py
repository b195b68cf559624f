"""`precedent models`: tries the architectures of the installed transformers, and says which can be a target model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from precedent.cli.options import JsonOption, write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent_testing.sweep import Outcome

BEGIN, END = "<!-- sweep -->", "<!-- /sweep -->"
"""What the table stands between in a Markdown file."""

HEAD = ("| model type | verdict | distance | reason |", "|---|---|---|---|")
"""What the table begins with."""

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
    write: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            writable=True,
            help=f"Put the table into this file, after {BEGIN}. Without --sweep, rows of other types stay.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Build a tiny random model of each architecture, score random trees with it and compare with plain forwards.

    The exit status is 1 if one crashed or computed something else; a refusal, which names its reason, is no failure.
    """
    progress: Progress = ctx.obj
    outcomes = list(_outcomes(_asked(model_types or (), sweep=sweep), progress))
    progress.rest()
    if write is None:
        typer.echo(table_of(list(map(Row.of, outcomes))))
    else:
        page = write.read_text(encoding="utf-8")
        write.write_text(with_rows(page, list(map(Row.of, outcomes)), anew=sweep), encoding="utf-8")
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
    from precedent_testing.tiny_configs import causal_lm_types

    known = causal_lm_types()
    unknown = sorted(set(model_types) - set(known))
    if unknown:
        raise ConfigError(f"transformers has no causal LM {unknown[0]!r}: model types are such as qwen3_next or llama")
    return list(model_types) or known


def _outcomes(model_types: Iterable[str], progress: Progress) -> Iterator[Outcome]:
    from precedent_testing.sweep import try_architecture

    for model_type in model_types:
        progress.show(f"trying {model_type}")
        yield try_architecture(model_type)


class Row(NamedTuple):
    """One row of the table, as it is written."""

    model_type: str
    verdict: str
    distance: str
    reason: str

    @classmethod
    def of(cls, outcome: Outcome) -> Row:
        """The row of an outcome."""
        distance = f"{outcome.distance:.0e}" if outcome.verdict.startswith("works") else ""
        return cls(outcome.model_type, outcome.verdict, distance, outcome.reason.replace("|", "/"))


def table_of(rows: Sequence[Row]) -> str:
    """The rows as Markdown, behind a line that counts the verdicts."""
    counts = Counter(row.verdict for row in rows)
    lines = [", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".", ""]
    return "\n".join([*lines, *HEAD, *(f"| {' | '.join(row)} |" for row in rows)])


def with_rows(page: str, rows: Sequence[Row], *, anew: bool) -> str:
    """A page with these rows in its table, in alphabetical order, beside those of other types unless written `anew`.

    Raises ConfigError for a page without the marks.
    """
    known = {} if anew else {row.model_type: row for row in _rows_of(page)}
    known |= {row.model_type: row for row in rows}
    return with_table(page, table_of([known[model_type] for model_type in sorted(known)]))


def _rows_of(page: str) -> Iterator[Row]:
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    for line in lines:
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if line not in HEAD and len(cells) == len(Row._fields):
            yield Row(*cells)


def with_table(page: str, table: str) -> str:
    """A page with the table in place of its old one. Raises ConfigError for a page without the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no place for the table: put {BEGIN} and {END} where it belongs")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"
