"""`precedent cache forget|verify|compact`: erases completions, checks and repairs the files, frees disk space."""

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
from precedent.cli.cache_table import counted, printable
from precedent.cli.options import JsonOption, write_json
from precedent.errors import CacheError

REPAIR_HELP = "Repair the damage; damaged completions are lost. A file that must be replaced is kept as FILE.damaged."

DAMAGED = 1
"""Exit status of `verify` if something stays damaged."""


def forget(
    cache: CacheArgument,
    tenant: TenantOption = None,
    before: BeforeOption = None,
    containing: ContainingOption = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", metavar="N", help="Only the completion with this number; repeatable.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All completions of all tenants.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Erase completions for good, and kept prefixes. A completion must meet all the given conditions."""
    with opened(cache) as store:
        selection = Selection(tenant, timestamp(before), containing, tuple(ids) if ids else None)
        if everything and not selection.everything:
            raise CacheError("--all cannot be combined with conditions; leave out --all or the conditions")
        if selection.everything and not everything:
            raise CacheError("say what to forget: --tenant, --before, --containing, --id, or --all for everything")
        number = store.forget(Selection(before=float("inf")) if everything else selection)
    if json_file is not None:
        write_json(json_file, {"forgotten": number})
    print(f"{counted(number)} forgotten")


def verify(
    cache: CacheArgument,
    repair: Annotated[bool, typer.Option("--repair", help=REPAIR_HELP)] = False,
    json_file: JsonOption = None,
) -> None:
    """Check the file, its log, and every record, checksum and index. Exit status 1 if unrepaired damage remains."""
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
    """Free the disk space of evicted and forgotten completions."""
    with opened(cache) as store:
        before, after = store.compact()
    if json_file is not None:
        write_json(json_file, {"bytes_before": before, "bytes_after": after})
    print(f"{before} bytes before, {after} bytes after")
