"""Reads LangChain's answer caches in a SQLite file as recorded calls.

Entries are read as plain JSON and never deserialized into the objects that they name.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from precedent.errors import PromptError
from precedent.text.traces import Skip, Trajectory, trajectory_of

TABLES = ("full_llm_cache", "full_md5_llm_cache")
"""The tables in which LangChain's `SQLiteCache` and `SQLAlchemyMd5Cache` keep prompts and responses."""


def is_answer_cache(path: Path) -> bool:
    """Whether a file is an SQLite database, and so may be a LangChain answer cache."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\x00"


def read_answer_cache(path: Path, skip: Skip) -> Iterator[Trajectory]:
    """The cached calls with their answers; `skip` gets an error for each entry that is not a chat call.

    Raises PromptError if the file is not an answer cache.
    """
    for number, (prompt, response) in enumerate(_entries(path), start=1):
        try:
            asked, answered = json.loads(prompt), json.loads(response)["kwargs"]
            run = {"inputs": {"messages": asked}, "outputs": {"generations": [answered]}}  # a LangSmith export's form
            yield trajectory_of(path, number, json.dumps(run))
        except PromptError as error:
            skip(error)
        except (ValueError, TypeError, AttributeError, KeyError):
            skip(PromptError(f"{path} line {number} is not a chat model's answer"))


def num_entries(path: Path) -> int:
    """The number of answers in a file."""
    return sum(1 for _ in _entries(path))


def _entries(path: Path) -> Iterator[tuple[str, str]]:
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
