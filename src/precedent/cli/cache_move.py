"""`precedent cache export|import`: moves completions as plain files to another machine, model or store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from precedent.cache import Selection
from precedent.cache.exports import Imported, export_cache, import_cache, read_export
from precedent.cli.cache_store import (
    UNBOUNDED,
    BeforeOption,
    CacheArgument,
    ContainingOption,
    EmbedderOption,
    NeverStoreOption,
    RedactOption,
    TenantOption,
    opened,
    redaction,
    timestamp,
)
from precedent.cli.cache_table import counted
from precedent.cli.options import JsonOption, write_json
from precedent.cli.progress import Progress


def export(
    ctx: typer.Context,
    cache: CacheArgument,
    folder: Annotated[Path, typer.Argument(file_okay=False, help="New folder to write to.", show_default=False)],
    tenant: TenantOption = None,
    before: BeforeOption = None,
    containing: ContainingOption = None,
    json_file: JsonOption = None,
) -> None:
    """Write completions to a file of JSON lines. The texts in it are not encrypted."""
    progress: Progress = ctx.obj
    with opened(cache) as store:
        count = progress.counter("exporting", store.stats().records)
        number = export_cache(store, folder, Selection(tenant, timestamp(before), containing), count)
    progress.rest()
    if json_file is not None:
        write_json(json_file, {"exported": number, "folder": str(folder)})
    print(f"{counted(number)} exported to {folder}")


def import_export(
    ctx: typer.Context,
    cache: CacheArgument,
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder written by `export`.", show_default=False)
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Re-tokenize texts from another tokenizer with that of this model (id or folder)."),
    ] = None,
    embedder: EmbedderOption = None,
    tenant: Annotated[str | None, typer.Option(help="Store all completions under this tenant.")] = None,
    never_store: NeverStoreOption = None,
    redact: RedactOption = None,
    json_file: JsonOption = None,
) -> None:
    """Store an export's completions with their times and counters. Importing it again changes nothing."""
    hook = redaction(never_store, redact)
    exported, tokenizer = read_export(folder), None if target is None else _writer(target)
    progress: Progress = ctx.obj
    with opened(cache, create=True, bounds=UNBOUNDED) as store:
        found = import_cache(
            exported, store, tokenizer=tokenizer, embedder=embedder, tenant=tenant,
            progress=progress.counter("importing", exported.records), redact=hook,
        )  # fmt: skip
    progress.rest()
    if json_file is not None:
        write_json(json_file, _as_dict(found))
    _print(found)


def _writer(target: str) -> Any:
    from precedent.target.load.loading import load_tokenizer
    from precedent.text.codec import TokenizerCodec

    return TokenizerCodec(load_tokenizer(target))


def _as_dict(found: Imported) -> dict[str, Any]:
    return {
        "read": found.read,
        "stored": found.filled.stored,
        "known": found.filled.known,
        "refused": found.filled.refused,
        "withheld": found.filled.withheld,
        "rewritten": found.rewritten,
        "skipped": [{"reason": reason, "count": count} for reason, count in found.skipped.items()],
    }


def _print(found: Imported) -> None:
    print(f"{counted(found.filled.stored)} imported, {found.filled.known} already present")
    if found.rewritten:
        print(f"{found.rewritten} re-tokenized for the model")
    if found.filled.refused:
        print(f"{found.filled.refused} refused: the cache is read-only")
    if found.filled.withheld:
        print(f"{found.filled.withheld} withheld by redaction")
    for reason, count in found.skipped.items():
        print(f"{count} skipped: {reason}")
