"""`precedent cache forget|verify|compact`: erase for good, check and repair, give space back."""

from __future__ import annotations

from typing import Annotated

import typer

from precedent.cache import Selection
from precedent.cli.cache_store import (
    BeforeOption,
    CacheArgument,
    ContainingOption,
    TenantOption,
    opened,
    timestamp,
)
from precedent.cli.options import JsonOption, write_json
from precedent.errors import CacheError


def forget(
    cache: CacheArgument,
    tenant: TenantOption = None,
    before: BeforeOption = None,
    containing: ContainingOption = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", metavar="N", help="This completion; may be repeated.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All completions of all tenants.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Erase completions for good, from table, file and log; all conditions that are given must hold."""
    with opened(cache) as store:
        selection = Selection(tenant, timestamp(before), containing, tuple(ids) if ids else None)
        if everything and not selection.everything:
            raise CacheError("--all stands alone; leave it out or leave out the conditions")
        if selection.everything and not everything:
            raise CacheError("say what to forget: --tenant, --before, --containing, --id, or --all for everything")
        number = store.forget(Selection(before=float("inf")) if everything else selection)
    if json_file is not None:
        write_json(json_file, {"forgotten": number})
    print(f"{number} completions forgotten")
