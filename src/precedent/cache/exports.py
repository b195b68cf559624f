"""Exports a cache as JSON lines, and imports them into any store, for another tokenizer or embedder if need be.

An export is a folder with one file, `completions.jsonl`. Its first line names format and embedder, its last one the
number of records and the SHA-256 of all lines before it; between them is one record a line, its vector as float32
in base64. It depends on no machine, store or library. The file appears when it is complete.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from precedent.cache.embedder import Embedder
from precedent.cache.files import new_file, open_own
from precedent.cache.filling import FillCounts, Vectors, fill
from precedent.cache.records import Completion, EmbedderIdentity, Selection, check_tenant
from precedent.cache.redaction import Redact
from precedent.cache.rows import embedder_in
from precedent.cache.store import CompletionStore
from precedent.errors import CacheError, CacheMismatchError
from precedent.runtime.plain_values import first_line, shown

FORMAT, VERSION = "precedent-export", 1
FILE = "completions.jsonl"
RECORDS_AT_ONCE = 1000
MOST_LINE_BYTES = 2**26
"""A longer line is refused, so that a hostile file cannot fill the memory."""

NO_TEXT = "no text to write with the new tokenizer"
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_FIELDS = {one.name: _TYPES[str(one.type)] for one in fields(Completion) if one.name not in ("token_ids", "vector")}


def export_cache(
    store: CompletionStore, folder: Path, selection: Selection, progress: Callable[[int], None] | None = None
) -> int:
    """Write the selected records to a new folder that only its owner can read; returns their number.

    `progress` is called with the number of records that were written since. Raises CacheError if the folder is not
    empty or cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CacheError(f"{folder} is not empty; give a new folder")
        with new_file(folder / FILE) as file:
            return _write(store, file, selection, progress or (lambda number: None))
    except OSError as error:
        raise CacheError(f"cannot export into {folder}: {error}") from error


def _write(store: CompletionStore, file: BinaryIO, selection: Selection, progress: Callable[[int], None]) -> int:
    embedder, written, number, last = store.embedder(), hashlib.sha256(), 0, 0

    def write(values: Mapping[str, Any]) -> None:
        line = json.dumps(values, ensure_ascii=False).encode() + b"\n"
        written.update(line)
        file.write(line)

    write({"format": FORMAT, "version": VERSION, "embedder": None if embedder is None else asdict(embedder)})
    while page := store.records(selection, last, RECORDS_AT_ONCE):
        for record in page:
            vector = record.vector_bytes
            values = {name: getattr(record, name) for name in ("token_ids", *_FIELDS)}
            write(values | {"vector": None if vector is None else base64.b64encode(vector).decode()})
        number, last = number + len(page), page[-1].id
        progress(len(page))
    write({"records": number, "sha256": written.hexdigest()})
    return number


@dataclass(frozen=True, slots=True)
class Export:
    """An export whose checksum holds: its file, number of records, and the embedder that made its vectors."""

    path: Path
    records: int
    embedder: EmbedderIdentity | None

    def completions(self) -> Iterator[Completion]:
        """Read the records one by one. Raises CacheError, naming the line, for one that no export has."""
        with _opened(self.path) as file:
            for number in range(1 + self.records):
                line = file.readline(MOST_LINE_BYTES)
                try:
                    if number:
                        yield _completion(json.loads(line))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise _refusal(self.path, f"line {number + 1} is no record: {first_line(error)}") from error


def read_export(folder: Path) -> Export:
    """Open a finished export and compare its checksum. Raises CacheError unless this version can read all of it."""
    path, read, lines, last = folder / FILE, hashlib.sha256(), 0, b""
    try:
        with _opened(path) as file:
            header = json.loads(file.readline(MOST_LINE_BYTES))
            if header["format"] != FORMAT:
                raise ValueError("another format")
            if header["version"] != VERSION:
                raise CacheMismatchError(f"{path} has export format {header['version']}; this version reads {VERSION}")
            file.seek(0)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    raise ValueError(f"a line has no end within {MOST_LINE_BYTES} bytes")
                read.update(last)
                last, lines = line, lines + 1
        trailer = json.loads(last)
        if (trailer["sha256"], trailer["records"]) != (read.hexdigest(), lines - 2):
            raise ValueError("its checksum differs")
    except FileNotFoundError as error:
        raise CacheError(f"{folder} is not a finished export: it has no {FILE}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(path, first_line(error)) from error
    recorded = header.get("embedder")
    embedder = None if recorded is None else embedder_in(json.dumps(recorded))
    if recorded is not None and embedder is None:
        raise _refusal(path, f"its record of the embedder is {shown(recorded)}")
    return Export(path, lines - 2, embedder)


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_own(path), "rb")


def _refusal(path: Path, reason: str) -> CacheError:
    return CacheError(f"{path} is not what an export wrote, or is damaged ({reason}); export again")


def _completion(values: Any) -> Completion:
    """A record with checked types, ignoring unknown fields: another program may have written the file."""
    for name, kind in _FIELDS.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise ValueError(f"{name}={shown(values[name])} has the wrong type")
    token_ids, vector = values["token_ids"], values["vector"]
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise ValueError(f"token_ids={shown(token_ids)} is not a list of numbers")
    if vector is not None:
        vector = np.frombuffer(base64.b64decode(vector, validate=True), "<f4")
        if not np.isfinite(vector).all():
            raise ValueError("its vector holds values that are not finite")
    return Completion(tuple(token_ids), **{name: values[name] for name in _FIELDS}, vector=vector)


class AnswerWriter(Protocol):
    """A tokenizer for answers: its fingerprint, and the ids of an answer's text, end token included."""

    @property
    def fingerprint(self) -> str:
        """See `precedent.cache.tokenizer_fingerprint`."""

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """The ids of a whole answer; empty for an empty text."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of an import; `rewritten` records were tokenized again with another tokenizer."""

    read: int
    rewritten: int
    filled: FillCounts
    skipped: Mapping[str, int]


def import_cache(
    export: Export,
    store: CompletionStore,
    *,
    tokenizer: AnswerWriter | None = None,
    embedder: str | Embedder | None = None,
    tenant: str | None = None,
    progress: Callable[[int], None] | None = None,
    redact: Redact | None = None,
) -> Imported:
    """Store the records of an export; importing again changes nothing.

    Records of a tokenizer other than `tokenizer` are tokenized again from their texts. Vectors of an embedder other
    than the store's (or, in an empty store, than `embedder`) are computed again. `tenant` replaces the recorded one;
    `redact` gets each record as it would be stored.
    Raises CacheError for a record that no export has; what was read before stays stored.
    """
    if tenant is not None:
        check_tenant(tenant)
    counts = Counter[str]()

    def adapted() -> Iterator[Completion]:
        for record in export.completions():
            counts["read"] += 1
            one = record if tenant is None else replace(record, tenant=tenant)
            if tokenizer is None or one.tokenizer == tokenizer.fingerprint:
                yield one
            elif one.text:  # the recorded model and prompt do not apply to other ids
                counts["rewritten"] += 1
                ids = tokenizer.answer_ids(one.text)
                yield replace(one, token_ids=ids, tokenizer=tokenizer.fingerprint, model="", prompt_fingerprint="")
            else:
                counts[NO_TEXT] += 1

    filled = fill(store, adapted(), Vectors(store, embedder, export.embedder), progress, redact=redact)
    skipped = {NO_TEXT: counts[NO_TEXT]} if counts[NO_TEXT] else {}
    return Imported(counts["read"], counts["rewritten"], filled, skipped)
