"""`precedent cache forget|verify|compact`: erases completions, checks the files, frees disk space."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from precedent.cache import Selection, VerifyReport
from precedent.cache.store import verify_store
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

DAMAGED = 1
"""Exit status of `verify` if something is damaged."""


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


def verify(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Check every page and every record's checksum. Exit status 1 if something is damaged."""
    report = verify_store(cache)
    values = {**dataclasses.asdict(report), "sound": report.sound}
    if json_file is not None:
        write_json(json_file, values)
    for finding in report.findings:
        print(f"{finding.kind}: {printable(finding.detail)}")
    print(f"{report.records} completions are sound" + ("" if report.sound else f"; {_what_to_do(report)}"))
    if not report.sound:
        raise typer.Exit(DAMAGED)


def _what_to_do(report: VerifyReport) -> str:
    if any(finding.kind == "structure" for finding in report.findings):
        return f"recover the rest with `sqlite3 {report.path} .recover`, or open the cache, which sets the file aside"
    return "damaged ones are never used; forget them by --id"


def compact(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Free the disk space of evicted and forgotten completions."""
    with opened(cache) as store:
        before, after = store.compact()
    if json_file is not None:
        write_json(json_file, {"bytes_before": before, "bytes_after": after})
    print(f"{before} bytes before, {after} bytes after")
