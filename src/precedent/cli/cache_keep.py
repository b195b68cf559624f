"""`precedent cache forget|verify|compact`: erase for good, check and repair, give space back."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from precedent.cache import Selection
from precedent.cache.opening import verify_store
from precedent.cli.cache_store import (
    BeforeOption,
    CacheArgument,
    ContainingOption,
    TenantOption,
    opened,
    timestamp,
)
from precedent.cli.cache_table import printable
from precedent.cli.options import JsonOption, write_json
from precedent.errors import CacheError

REPAIR_HELP = "Mend what is found; damaged completions are lost. A file that has to be replaced stays as FILE.damaged."

DAMAGED = 1
"""Exit status of `verify` where something is damaged."""


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


def verify(
    cache: CacheArgument,
    repair: Annotated[bool, typer.Option("--repair", help=REPAIR_HELP)] = False,
    json_file: JsonOption = None,
) -> None:
    """Check file, log, every record, sum and index; exit status 1 where something is damaged and was not repaired."""
    report = verify_store(cache, repair=repair)
    values = {**dataclasses.asdict(report), "sound": report.sound}
    if json_file is not None:
        write_json(json_file, values)
    for finding in report.findings:
        print(f"{finding.kind}: {printable(finding.detail)}{', repaired' if finding.repaired else ''}")
    print(f"{report.records} completions are sound" + ("" if report.sound else "; repair the rest with --repair"))
    if not report.sound:
        raise typer.Exit(DAMAGED)


def compact(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Give back to the disk what evicted and forgotten completions have left."""
    with opened(cache) as store:
        before, after = store.compact()
    if json_file is not None:
        write_json(json_file, {"bytes_before": before, "bytes_after": after})
    print(f"{before} bytes before, {after} bytes now")
