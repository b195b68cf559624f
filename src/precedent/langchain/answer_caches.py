"""Reads LangChain's answer caches, in a SQLite file or in memory, as recorded calls.

Entries are read as plain JSON and never deserialized into the objects that they name.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.load import dumps

from precedent.errors import PromptError, UnsupportedError
from precedent.text.traces import Skip, Trajectory, trajectory_of

TABLES = ("full_llm_cache", "full_md5_llm_cache")
"""The tables in which LangChain's `SQLiteCache` and `SQLAlchemyMd5Cache` keep prompts and responses."""


def is_answer_cache(path: Path) -> bool:
    """Whether a file is an SQLite database, and so may be a LangChain answer cache."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\x00"


def read_answer_cache(source: Path | BaseCache, skip: Skip) -> Iterator[Trajectory]:
    """The cached calls with their answers; `skip` gets an error for each entry that is not a chat call.

    Raises PromptError if the file is not an answer cache, UnsupportedError if the cache cannot list its entries.
    """
    path = source if isinstance(source, Path) else Path(type(source).__name__)
    for number, (prompt, response) in enumerate(_entries(source), start=1):
        try:
            yield trajectory_of(path, number, _line(prompt, response))
        except PromptError as error:
            skip(error)
        except (ValueError, TypeError, AttributeError, KeyError):
            skip(PromptError(f"{path} line {number} is not a chat model's answer"))


def num_entries(path: Path) -> int:
    """The number of answers in a file."""
    return sum(1 for _ in _entries(path))


def _entries(source: Path | BaseCache) -> Iterator[tuple[str, str]]:
    if isinstance(source, Path):
        yield from _rows(source)
    elif isinstance(source, InMemoryCache):
        for (prompt, _), generations in source._cache.items():
            yield from ((prompt, dumps(generation)) for generation in generations)
    else:
        raise UnsupportedError(
            f"{type(source).__name__} cannot list its entries: give its SQLite file, or record calls with "
            "PrecedentRecorder and warm from that log"
        )


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """Prompt and response of every answer, oldest first; the file is opened read-only."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = [name for name in TABLES if name in names]
            if not found:
                raise PromptError(f"{path} is not a LangChain answer cache: it has no table {' or '.join(TABLES)}")
            for name in found:
                yield from connection.execute(f"SELECT prompt, response FROM {name} ORDER BY rowid")
    except sqlite3.Error as error:
        raise PromptError(f"cannot read {path}: {error}") from error


def _line(prompt: str, response: str) -> str:
    """One call in the form of a LangSmith export."""
    messages: Any = json.loads(prompt)
    return json.dumps({"inputs": {"messages": messages}, "outputs": {"generations": [json.loads(response)["kwargs"]]}})
