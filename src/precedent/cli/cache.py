"""`precedent cache`: look into a speculation cache, search it, and erase from it. Needs no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precedent.cache import CacheStats, Selection, SQLiteStore, StoredCompletion
from precedent.cli.options import JsonOption, write_json
from precedent.errors import CacheError

app = typer.Typer(help="Look into a speculation cache, search it, and erase from it.", no_args_is_help=True)

PathArgument = Annotated[Path, typer.Argument(help="The cache's folder, or its .sqlite file.", show_default=False)]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Only this tenant's completions.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest first.")]

SHOWN_CHARACTERS = 80
"""Longest query or text that is shown; `--json` holds them whole."""

LAST_COLUMN = "query → text"
TENANT_WIDTH = 12
"""Characters of a tenant's name beside texts; a longer one goes on in the next line."""

NUMBERS = ("id", "tokens", "count", "accepted", "rejected", "records", "bytes", "hits")


@app.command(epilog="Example:  precedent cache stats ~/.cache/precedent")
def stats(path: PathArgument, json_file: JsonOption = None) -> None:
    """Records, tokens, bytes and accepted tokens, in all and by tenant."""
    with _opened(path) as store:
        found = store.stats()
        values = dataclasses.asdict(found)
        del values["max_bytes"]  # belongs to whoever fills the cache, not to the file
        if json_file is not None:
            write_json(json_file, values)
        _print_stats(found)


@app.command(name="list", epilog="Example:  precedent cache list ~/.cache/precedent --tenant shop --limit 20")
def list_completions(
    path: PathArgument, tenant: TenantOption = None, limit: LimitOption = 50, json_file: JsonOption = None
) -> None:
    """The stored completions, the newest first."""
    with _opened(path) as store:
        _show(store.list(Selection(tenant=tenant), limit), json_file)


@app.command(epilog='Example:  precedent cache search ~/.cache/precedent "refund" --limit 5')
def search(
    path: PathArgument,
    text: Annotated[str, typer.Argument(help="What the query or the text contains.", show_default=False)],
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    json_file: JsonOption = None,
) -> None:
    """The completions whose query or text contains TEXT, without regard to case."""
    with _opened(path) as store:
        _show(store.list(Selection(tenant=tenant, containing=text), limit), json_file)


@app.command(epilog='Example:  precedent cache forget ~/.cache/precedent --tenant shop --containing "Elm Street"')
def forget(
    path: PathArgument,
    tenant: TenantOption = None,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="First stored before this ISO date or time, e.g. 2026-01-31.")
    ] = None,
    containing: Annotated[str | None, typer.Option(metavar="TEXT", help="Query or text contains TEXT.")] = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", metavar="N", help="This completion; may be repeated.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All completions of all tenants.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Erase completions for good, from table, file and log; all conditions that are given must hold."""
    with _opened(path) as store:
        selection = Selection(tenant, _timestamp(before), containing, tuple(ids) if ids else None)
        if everything and not selection.everything:
            raise CacheError("--all stands alone; leave it out or leave out the conditions")
        if selection.everything and not everything:
            raise CacheError("say what to forget: --tenant, --before, --containing, --id, or --all for everything")
        number = store.forget(Selection(before=float("inf")) if everything else selection)
        if json_file is not None:
            write_json(json_file, {"forgotten": number})
        print(f"{number} completions forgotten")


@contextmanager
def _opened(path: Path) -> Iterator[SQLiteStore]:
    store = SQLiteStore.open(path, create=False)
    try:
        yield store
    finally:
        store.close()


def _timestamp(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError) as error:
        raise CacheError(f"{given!r} is no date; write 2026-01-31 or 2026-01-31T18:00:00+00:00") from error


def _show(completions: Sequence[StoredCompletion], json_file: Path | None) -> None:
    if json_file is not None:
        write_json(json_file, {"completions": [dataclasses.asdict(one) for one in completions]})
    _print_completions(completions)


def _print_completions(completions: Sequence[StoredCompletion]) -> None:
    """One completion a row; counters share columns, for a terminal of 80 characters must hold the texts as well."""
    columns: dict[str, Callable[[StoredCompletion], object]] = {
        "id": lambda one: one.id,
        "stored": lambda one: datetime.fromtimestamp(one.created).strftime("%y-%m-%d %H:%M"),
        "tenant": lambda one: one.tenant,
        "tokens": lambda one: f"{len(one.token_ids)}" + (f" ×{one.count}" if one.count > 1 else ""),
        "accepted": lambda one: f"{one.accepted}/{one.accepted + one.rejected}",
        LAST_COLUMN: lambda one: f"{_shortened(one.query)} → {_shortened(one.text)}",
    }
    _print_table(columns, [[value(one) for value in columns.values()] for one in completions])
    print(f"{len(completions)} completions")


def _print_stats(found: CacheStats) -> None:
    columns = ("tenant", "records", "tokens", "bytes", "hits", "accepted", "rejected")
    _print_table(columns, [[getattr(one, name) for name in columns] for one in found.tenants])
    made_by = f"embedder {found.embedder}" if found.embedder else "no vectors yet"
    state = ", read-only" if found.read_only else ""
    print(f"{found.records} completions, {found.tokens} tokens, {found.file_bytes} bytes on disk; {made_by}{state}")


def _print_table(columns: Iterable[str], table_rows: list[list[object]]) -> None:
    table, names = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0)), list(columns)
    for name in names:
        widest = TENANT_WIDTH if name == "tenant" and LAST_COLUMN in names else None
        right = name in NUMBERS
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=right or name == "stored",
            overflow="fold",
            max_width=widest,
        )
    for row in table_rows:
        table.add_row(*(Text(_printable(str(cell))) for cell in row))
    Console().print(table)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def _printable(text: str) -> str:
    # what a model wrote must not steer the terminal
    return "".join(character if character.isprintable() else "�" for character in text)
