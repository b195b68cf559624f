"""`precedent cache stats|list|show|search`: what is in a cache. Needs no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from precedent.cache import Selection, StoredCompletion
from precedent.cli.cache_store import CacheArgument, TenantOption, opened
from precedent.cli.cache_table import print_completion, print_completions, print_stats
from precedent.cli.options import JsonOption, write_json
from precedent.errors import CacheError

LimitOption = Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest first.")]


def stats(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Records, tokens, bytes and accepted tokens, in all and by tenant."""
    with opened(cache) as store:
        found = store.stats()
    values = dataclasses.asdict(found)
    del values["max_bytes"]  # belongs to whoever fills the cache, not to the file
    if json_file is not None:
        write_json(json_file, values)
    print_stats(found)


def list_completions(
    cache: CacheArgument, tenant: TenantOption = None, limit: LimitOption = 50, json_file: JsonOption = None
) -> None:
    """The stored completions, the newest first."""
    with opened(cache) as store:
        found = store.list(Selection(tenant=tenant), limit)
    _write(found, json_file)
    print_completions(found)


def search(
    cache: CacheArgument,
    text: Annotated[str, typer.Argument(help="What the query or the text contains.", show_default=False)],
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    json_file: JsonOption = None,
) -> None:
    """The completions whose query or text contains TEXT, without regard to case."""
    with opened(cache) as store:
        found = store.list(Selection(tenant=tenant, containing=text), limit)
    _write(found, json_file)
    print_completions(found, needle=text)


def show(
    cache: CacheArgument,
    completion_id: Annotated[int, typer.Argument(metavar="ID", help="Its number in `list`.", show_default=False)],
    json_file: JsonOption = None,
) -> None:
    """One completion with all that is known of it, its query and its text whole."""
    with opened(cache) as store:
        found = store.list(Selection(ids=(completion_id,)), 1)
    if not found:
        raise CacheError(f"there is no completion {completion_id}; `precedent cache list` shows which there are")
    if json_file is not None:
        write_json(json_file, {"completion": dataclasses.asdict(found[0])})
    print_completion(found[0])


def _write(completions: Sequence[StoredCompletion], json_file: Path | None) -> None:
    if json_file is not None:
        write_json(json_file, {"completions": [dataclasses.asdict(one) for one in completions]})
