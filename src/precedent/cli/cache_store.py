"""What the `precedent cache` commands share: their options, and opening the store."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer

from precedent.cache import Bounds, CompletionStore, Redact, never_store
from precedent.cache.redaction import in_turn
from precedent.cache.store import open_store
from precedent.errors import CacheError

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

UNBOUNDED = Bounds(max_bytes=2**62)
"""For commands that fill a cache: they evict nothing, because the process that uses the cache sets its bounds."""


@contextmanager
def opened(where: str, *, bounds: Bounds | None = None, create: bool = False) -> Iterator[CompletionStore]:
    """Open the store at `where`, which must exist unless `create` is true, and close it at the end."""
    store = open_store(where, bounds=bounds, create=create)
    try:
        yield store
    finally:
        store.close()


def redaction(never_store_these: Sequence[str] | None, named: str | None) -> Redact | None:
    """The redaction that both options ask for together. Raises CacheError for an invalid pattern or name."""
    steps = [never_store(*never_store_these)] if never_store_these else []
    steps += [_named(named)] if named else []
    return in_turn(*steps) if steps else None


def _named(name: str) -> Redact:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise CacheError(f"--redact {name}: {error}; give MODULE:NAME of an importable function") from error
    if not callable(found):
        raise CacheError(f"--redact {name} is not a function; give MODULE:NAME of one")
    redact: Redact = found
    return redact


def timestamp(given: str | None) -> float | None:
    """Convert an ISO date or time to seconds since the epoch. Raises CacheError if it is neither."""
    if given is None:
        return None
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError) as error:
        raise CacheError(f"{given!r} is not a date; write 2026-01-31 or 2026-01-31T18:00:00+00:00") from error
