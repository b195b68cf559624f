"""What the commands of `precedent cache` share: the cache's place, the selection of completions, and an open store."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer

from precedent.cache import Bounds, CompletionStore, Redact, never_store
from precedent.cache.opening import open_store
from precedent.cache.store.redaction import in_turn
from precedent.errors import CacheError

CacheArgument = Annotated[
    str,
    typer.Argument(metavar="CACHE", help="The cache's folder, its .sqlite file, or its URL.", show_default=False),
]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Only this tenant's completions.")]
BeforeOption = Annotated[
    str | None,
    typer.Option("--before", metavar="TIME", help="First stored before this ISO date or time, e.g. 2026-01-31."),
]
ContainingOption = Annotated[
    str | None, typer.Option("--containing", metavar="TEXT", help="Query or text contains TEXT.")
]
EmbedderOption = Annotated[
    str | None, typer.Option("--embedder", help="sentence-transformers id or folder; by default all-MiniLM-L6-v2.")
]

NeverStoreOption = Annotated[
    list[str] | None,
    typer.Option("--never-store", metavar="REGEX", help="Leave out what matches in query or text; may be given again."),
]
RedactOption = Annotated[
    str | None,
    typer.Option("--redact", metavar="MODULE:NAME", help="The function that SpeculationCache.open(redact=…) is given."),
]

UNBOUNDED = Bounds(max_bytes=2**62)
"""For a command that fills a cache: its bounds belong to whoever uses it, and nothing is evicted here."""


@contextmanager
def opened(where: str, *, bounds: Bounds | None = None, create: bool = False) -> Iterator[CompletionStore]:
    """The store at a place, which must be there unless it may be created; closed at the end."""
    store = open_store(where, bounds=bounds, create=create)
    try:
        yield store
    finally:
        store.close()


def redaction(never_store_these: Sequence[str] | None, named: str | None) -> Redact | None:
    """What the options say of redaction, both together. Raises CacheError for a pattern or a name that is none."""
    steps = [never_store(*never_store_these)] if never_store_these else []
    steps += [_named(named)] if named else []
    return in_turn(*steps) if steps else None


def _named(name: str) -> Redact:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise CacheError(f"--redact {name}: {error}; write MODULE:NAME of what can be imported here") from error
    if not callable(found):
        raise CacheError(f"--redact {name} is no function")
    redact: Redact = found
    return redact


def timestamp(given: str | None) -> float | None:
    """An ISO date or time in seconds since the epoch. Raises CacheError for anything else."""
    if given is None:
        return None
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError) as error:
        raise CacheError(f"{given!r} is no date; write 2026-01-31 or 2026-01-31T18:00:00+00:00") from error
