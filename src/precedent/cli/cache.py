"""`precedent cache`: inspects and maintains a speculation cache, fills it, and moves completions in and out."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precedent.cache import Bounds, Completion, CompletionStore, Redact, Selection, never_store
from precedent.cache.exports import export_cache, import_cache, read_export
from precedent.cache.filling import Vectors, fill
from precedent.cache.redaction import in_turn
from precedent.cache.store import open_store, verify_store
from precedent.cli.options import DEFAULT_TARGET, ChatTemplateOption, JsonOption, TargetOption, printable, write_json
from precedent.cli.progress import Progress
from precedent.errors import CacheError

UNBOUNDED = Bounds(max_bytes=2**62)
"""For commands that fill a cache: they evict nothing, because the process that uses the cache sets its bounds."""

DAMAGED = 1
"""Exit status of `verify` if something is damaged."""

_CACHE = "~/.cache/precedent"

TENANT_WIDTH = 12
"""Characters of a tenant's name in the list of completions."""

BEFORE_MATCH = 12
"""Characters shown before a search match."""

QUERY = "query: what recall compares, not the prompt (recent actions and the last messages, newest first, no numbers)"
"""Explains a stored query, which `text.query` builds."""

app = typer.Typer(help="Inspect, maintain, fill and move a speculation cache.", no_args_is_help=True)

CacheArgument = Annotated[
    str,
    typer.Argument(metavar="CACHE", help="The cache's folder, its .sqlite file, or its URL.", show_default=False),
]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Only this tenant's completions.")]
BeforeOption = Annotated[
    str | None,
    typer.Option(
        "--before", metavar="TIME", help="Only completions first stored before this ISO date or time, e.g. 2026-01-31."
    ),
]
ContainingOption = Annotated[
    str | None, typer.Option("--containing", metavar="TEXT", help="Only completions whose query or text contains TEXT.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Show at most this many, newest first.")]
EmbedderOption = Annotated[
    str | None, typer.Option("--embedder", help="sentence-transformers id or folder. Default: all-MiniLM-L6-v2.")
]
NeverStoreOption = Annotated[
    list[str] | None,
    typer.Option("--never-store", metavar="REGEX", help="Skip completions whose query or text matches; repeatable."),
]
RedactOption = Annotated[
    str | None,
    typer.Option(
        "--redact", metavar="MODULE:NAME", help="Redact with this function, as SpeculationCache.open(redact=…) does."
    ),
]


@app.command(epilog=f"Example:  precedent cache stats {_CACHE}")
def stats(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Show records, tokens, bytes and accepted tokens, in total and by tenant."""
    with _opened(cache) as store:
        found = store.stats()
    values = asdict(found)
    del values["max_bytes"]  # a setting of the process that fills the cache, not a property of the file
    write_json(json_file, values)
    names = ["tenant", "records", "tokens", "bytes", "hits", "accepted", "rejected"]
    _print_table(names, ([str(getattr(share, name)) for name in names] for share in found.tenants))
    made_by = f"embedder {found.embedder}" if found.embedder else "no vectors yet"
    state = ", read-only" if found.read_only else ""
    print(f"{found.records} completions, {found.tokens} tokens, {found.file_bytes} bytes on disk; {made_by}{state}")


@app.command("list", epilog=f"Example:  precedent cache list {_CACHE} --tenant shop --limit 20")
def list_completions(
    cache: CacheArgument, tenant: TenantOption = None, limit: LimitOption = 50, json_file: JsonOption = None
) -> None:
    """List the stored completions, newest first."""
    _list(cache, Selection(tenant=tenant), limit, json_file)


@app.command(epilog=f'Example:  precedent cache search {_CACHE} "refund" --limit 5')
def search(
    cache: CacheArgument,
    text: Annotated[str, typer.Argument(help="Text to look for.", show_default=False)],
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    json_file: JsonOption = None,
) -> None:
    """List the completions whose query or text contains TEXT, ignoring case."""
    _list(cache, Selection(tenant=tenant, containing=text), limit, json_file)


def _list(cache: str, selection: Selection, limit: int, json_file: Path | None) -> None:
    with _opened(cache) as store:
        found = store.list(selection, limit)
    write_json(json_file, {"completions": [_as_dict(one) for one in found]})
    _print_table(["id", "stored", "tenant", "tokens", "accepted", "text"], (_row(one, selection) for one in found))
    print(_counted(len(found)))


def _row(one: Completion, selection: Selection) -> list[str]:
    written, tried = f" ×{one.count}" if one.count > 1 else "", one.accepted + one.rejected
    tenant = one.tenant if len(one.tenant) <= TENANT_WIDTH else f"{one.tenant[: TENANT_WIDTH - 1]}…"
    counts = f"{len(one.token_ids)}{written}", f"{one.accepted}/{tried}" if tried else ""
    return [str(one.id), _time(one.created)[:10], tenant, *counts, _excerpt(one, selection.containing or "")]


def _excerpt(one: Completion, needle: str) -> str:
    """The text (or else the query) as one line, from shortly before the first `needle` onwards."""
    lines = [" ".join(text.split()) for text in (one.text, one.query) if text.strip()]
    for line in lines if needle else ():
        place = line.casefold().find(" ".join(needle.split()).casefold())
        if place >= 0:
            return line if place <= BEFORE_MATCH else f"…{line[place - BEFORE_MATCH :]}"
    return lines[0] if lines else ""


@app.command(epilog=f"Example:  precedent cache show {_CACHE} 17")
def show(
    cache: CacheArgument,
    completion_id: Annotated[int, typer.Argument(metavar="ID", help="Its number in `list`.", show_default=False)],
    json_file: JsonOption = None,
) -> None:
    """Show everything stored about one completion, with its full query and text."""
    with _opened(cache) as store:
        found = store.list(Selection(ids=(completion_id,)), 1)
    if not found:
        raise CacheError(f"there is no completion {completion_id}; see `precedent cache list`")
    (one,) = found
    write_json(json_file, {"completion": _as_dict(one)})
    values = {
        "tenant": one.tenant,
        "stored": f"{_time(one.created)}, {one.count} times",
        "tokens": str(len(one.token_ids)),
        "used": f"in {one.hits} requests: {one.accepted} tokens accepted, {one.rejected} rejected",
        "tokenizer": one.tokenizer,
        "model": one.model,
        "prompt": one.prompt_fingerprint,
        "tools": one.tools,
        "workflow step": one.workflow_step,
    }
    print(f"completion {one.id}")
    for name, value in values.items():
        if value:
            print(f"  {name:<14}{printable(value)}")
    for name, text in ((QUERY, one.query), ("text", one.text)):
        print(f"\n{name}\n" + "\n".join(f"  {printable(line)}" for line in text.splitlines() or ["(none)"]))


def _as_dict(completion: Completion) -> dict[str, Any]:
    """A completion for JSON, without the vector, which these commands do not read."""
    values = asdict(completion)
    del values["vector"]
    return values


@app.command(epilog=f'Example:  precedent cache forget {_CACHE} --tenant shop --containing "Elm Street"')
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
    with _opened(cache) as store:
        selection = Selection(tenant, _timestamp(before), containing, tuple(ids) if ids else None)
        if everything and not selection.everything:
            raise CacheError("--all cannot be combined with conditions; leave out --all or the conditions")
        if selection.everything and not everything:
            raise CacheError("say what to forget: --tenant, --before, --containing, --id, or --all for everything")
        number = store.forget(Selection(before=float("inf")) if everything else selection)
    write_json(json_file, {"forgotten": number})
    print(f"{_counted(number)} forgotten")


@app.command(epilog=f"Example:  precedent cache verify {_CACHE}")
def verify(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Check every page and every record's checksum. Exit status 1 if something is damaged."""
    report = verify_store(cache)
    write_json(json_file, {**asdict(report), "sound": report.sound})
    for finding in report.findings:
        print(f"{finding.kind}: {printable(finding.detail)}")
    advice = ""
    if any(finding.kind == "structure" for finding in report.findings):
        recover = f"recover the rest with `sqlite3 {report.path} .recover`"
        advice = f"; {recover}, or open the cache, which sets the file aside"
    elif not report.sound:
        advice = "; damaged ones are never used; forget them by --id"
    print(f"{report.records} completions are sound{advice}")
    if not report.sound:
        raise typer.Exit(DAMAGED)


@app.command(epilog=f"Example:  precedent cache compact {_CACHE}")
def compact(cache: CacheArgument, json_file: JsonOption = None) -> None:
    """Free the disk space of evicted and forgotten completions."""
    with _opened(cache) as store:
        before, after = store.compact()
    write_json(json_file, {"bytes_before": before, "bytes_after": after})
    print(f"{before} bytes before, {after} bytes after")


@app.command(epilog=f"Example:  precedent cache export {_CACHE} backup --tenant shop")
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
    with _opened(cache) as store:
        count = progress.counter("exporting", store.stats().records)
        number = export_cache(store, folder, Selection(tenant, _timestamp(before), containing), count)
    progress.rest()
    write_json(json_file, {"exported": number, "folder": str(folder)})
    print(f"{_counted(number)} exported to {folder}")


@app.command("import", epilog=f"Example:  precedent cache import {_CACHE} backup --target my-new-model")
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
    hook, exported, codec = _redaction(never_store, redact), read_export(folder), None
    if target is not None:
        from precedent.target.load.loading import load_tokenizer
        from precedent.text.codec import TokenizerCodec

        codec = TokenizerCodec(load_tokenizer(target))
    progress: Progress = ctx.obj
    with closing(open_store(cache, bounds=UNBOUNDED, create=True)) as store:
        found = import_cache(
            exported, store, tokenizer=codec, embedder=embedder, tenant=tenant,
            progress=progress.counter("importing", exported.records), redact=hook,
        )  # fmt: skip
    progress.rest()
    skipped = [{"reason": reason, "count": count} for reason, count in found.skipped.items()]
    results = {"read": found.read, **asdict(found.filled), "rewritten": found.rewritten, "skipped": skipped}
    write_json(json_file, results)
    print(f"{_counted(found.filled.stored)} imported, {found.filled.known} already present")
    if found.rewritten:
        print(f"{found.rewritten} re-tokenized for the model")
    _print_left_out(results)


@app.command(epilog=f"Example:  precedent cache warm {_CACHE} chats.jsonl.gz .langchain.db --target my-model")
def warm(
    ctx: typer.Context,
    cache: CacheArgument,
    sources: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="FILE…",
            help="OpenAI-format chats or LangSmith runs (JSONL, .gz), or LangChain answer caches (SQLite).",
            show_default=False,
        ),
    ],
    target: TargetOption = DEFAULT_TARGET,
    chat_template: ChatTemplateOption = None,
    embedder: EmbedderOption = None,
    tenant: Annotated[str, typer.Option(help="Store the completions under this tenant.")] = "default",
    never_store: NeverStoreOption = None,
    redact: RedactOption = None,
    json_file: JsonOption = None,
) -> None:
    """Store recorded answers as if the model had given them. After an interruption, run it again to continue."""
    from precedent.langchain.recorded import AnswerReader
    from precedent.target.load.loading import load_tokenizer

    hook = _redaction(never_store, redact)
    reader = AnswerReader(load_tokenizer(target, chat_template), tenant=tenant)
    progress: Progress = ctx.obj
    progress.show("reading the files")
    with closing(open_store(cache, bounds=UNBOUNDED, create=True)) as store:
        calls = progress.each(_calls(sources, reader.skipped), "warming the cache")
        answers = (one for call in calls for one in reader.completions(call))
        filled = fill(store, answers, Vectors(store, embedder), redact=hook)
    progress.rest()
    results = {"read": reader.num_read, **asdict(filled), "skipped": reader.skipped.as_list()}
    write_json(json_file, results)
    print(f"{filled.stored} completions stored, {filled.known} already present")
    _print_left_out(results)


def _calls(sources: Iterable[Path], skipped: Any) -> Iterator[Any]:
    from precedent.langchain.recorded import is_answer_cache, read_answer_cache
    from precedent.text.traces import read_trajectories

    for source in sources:
        if is_answer_cache(source):
            yield from read_answer_cache(source, skipped.add)
        else:
            yield from read_trajectories([source], skipped.add)


def _print_left_out(results: Mapping[str, Any]) -> None:
    if results["refused"]:
        print(f"{results['refused']} refused: the cache is read-only")
    if results["withheld"]:
        print(f"{results['withheld']} withheld by redaction")
    for skipped in results["skipped"]:
        first = f" (first: {skipped['first']})" if "first" in skipped else ""
        print(f"{skipped['count']} skipped: {skipped['reason']}{first}")


def _redaction(patterns: Sequence[str] | None, named: str | None) -> Redact | None:
    """The redaction that both options ask for together. Raises CacheError for an invalid pattern or name."""
    steps = [never_store(*patterns)] if patterns else []
    if named:
        module, _, function = named.partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise CacheError(f"--redact {named}: {error}; give MODULE:NAME of an importable function") from error
        if not callable(found):
            raise CacheError(f"--redact {named} is not a function; give MODULE:NAME of one")
        steps.append(found)
    return in_turn(*steps) if steps else None


def _timestamp(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError) as error:
        raise CacheError(f"{given!r} is not a date; write 2026-01-31 or 2026-01-31T18:00:00+00:00") from error


def _counted(number: int) -> str:
    return "1 completion" if number == 1 else f"{number} completions"


def _opened(cache: str) -> AbstractContextManager[CompletionStore]:
    return closing(open_store(cache, create=False))


def _print_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in which numbers are on the right; a column `text` fills the line and is cut at its end."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), expand="text" in names)
    for name in names:
        if name == "text":
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            justify: Any = "left" if name in ("stored", "tenant") else "right"
            table.add_column(name, justify=justify, no_wrap=name != "tenant", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
