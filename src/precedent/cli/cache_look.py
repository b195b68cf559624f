"""`precedent cache stats|list|show|search`: shows what a cache holds. Needs no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from precedent.cache import Completion, Selection
from precedent.cli.cache_store import CacheArgument, TenantOption, opened
from precedent.cli.cache_table import print_completion, print_completions, print_stats
from precedent.cli.options import JsonOption, write_json
from precedent.errors import CacheError

LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Show at most this many, newest first.")]


def stats(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Show records, tokens, bytes and accepted tokens, in total and by tenant."""
    with opened(cache) as store:
        found = store.stats()
    values = dataclasses.asdict(found)
    del values["max_bytes"]  # a setting of the process that fills the cache, not a property of the file
    if json_file is not None:
        write_json(json_file, values)
    print_stats(found)


def list_completions(
    cache: CacheArgument, tenant: TenantOption = None, limit: LimitOption = 50, json_file: JsonOption = None
) -> None:
    """List the stored completions, newest first."""
    with opened(cache) as store:
        found = store.list(Selection(tenant=tenant), limit)
    _write(found, json_file)
    print_completions(found)


def search(
    cache: CacheArgument,
    text: Annotated[str, typer.Argument(help="Text to look for.", show_default=False)],
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    json_file: JsonOption = None,
) -> None:
    """List the completions whose query or text contains TEXT, ignoring case."""
    with opened(cache) as store:
        found = store.list(Selection(tenant=tenant, containing=text), limit)
    _write(found, json_file)
    print_completions(found, needle=text)


def show(
    cache: CacheArgument,
    completion_id: Annotated[int, typer.Argument(metavar="ID", help="Its number in `list`.", show_default=False)],
    json_file: JsonOption = None,
) -> None:
    """Show everything stored about one completion, with its full query and text."""
    with opened(cache) as store:
        found = store.list(Selection(ids=(completion_id,)), 1)
    if not found:
        raise CacheError(f"there is no completion {completion_id}; see `precedent cache list`")
    if json_file is not None:
        write_json(json_file, {"completion": _values(found[0])})
    print_completion(found[0])


def _write(completions: Sequence[Completion], json_file: Path | None) -> None:
    if json_file is not None:
        write_json(json_file, {"completions": [_values(one) for one in completions]})


def _values(found: Completion) -> dict[str, Any]:
    """The fields of a completion for JSON; no command shows its vector."""
    return {name: value for name, value in dataclasses.asdict(found).items() if name != "vector"}
