"""Prints completions and counts on a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precedent.cache import CacheStats, Completion

TENANT_WIDTH = 12
"""Characters of a tenant's name in the list of completions."""

BEFORE_MATCH = 12
"""Characters shown before a search match."""

QUERY = "query: what recall compares, not the prompt (recent actions and the last messages, newest first, no numbers)"
"""Explains a stored query, which `text.query` builds."""

NUMBERS = ("id", "tokens", "accepted", "records", "bytes", "hits", "rejected")


def print_completions(completions: Sequence[Completion], needle: str = "") -> None:
    """Print one line per completion, cut at the terminal's edge; a text that contains `needle` starts near it."""
    table = _table(["id", "stored", "tenant", "tokens", "accepted"])
    table.expand = True
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in completions:
        written = f" ×{one.count}" if one.count > 1 else ""
        tried = one.accepted + one.rejected
        tenant = one.tenant if len(one.tenant) <= TENANT_WIDTH else f"{one.tenant[: TENANT_WIDTH - 1]}…"
        counts = f"{len(one.token_ids)}{written}", f"{one.accepted}/{tried}" if tried else ""
        cells = (str(one.id), _time(one.created)[:10], tenant, *counts, excerpt(one, needle))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console().print(table)
    print("1 completion" if len(completions) == 1 else f"{len(completions)} completions")


def print_completion(one: Completion) -> None:
    """Print everything stored about a completion, with its full texts."""
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


def print_stats(found: CacheStats) -> None:
    """Print each tenant's share in a table and the totals in one line."""
    names = ["tenant", "records", "tokens", "bytes", "hits", "accepted", "rejected"]
    table = _table(names)
    for share in found.tenants:
        table.add_row(*(Text(printable(str(getattr(share, name)))) for name in names))
    Console().print(table)
    made_by = f"embedder {found.embedder}" if found.embedder else "no vectors yet"
    state = ", read-only" if found.read_only else ""
    print(f"{found.records} completions, {found.tokens} tokens, {found.file_bytes} bytes on disk; {made_by}{state}")


def excerpt(one: Completion, needle: str = "") -> str:
    """The text (or else the query) as one line, from shortly before the first `needle` onwards."""
    lines = [" ".join(text.split()) for text in (one.text, one.query) if text.strip()]
    for line in lines if needle else ():
        place = line.casefold().find(" ".join(needle.split()).casefold())
        if place >= 0:
            return line if place <= BEFORE_MATCH else f"…{line[place - BEFORE_MATCH :]}"
    return lines[0] if lines else ""


def printable(text: str) -> str:
    """The text without control characters: a model wrote it, and they could steer the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _table(names: Iterable[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        right = name in NUMBERS
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "tenant", overflow="fold")
    return table


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
