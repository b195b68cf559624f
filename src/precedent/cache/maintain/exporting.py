"""Exports a cache as plain files: records as JSON lines, token ids and vectors as safetensors, and a manifest.

    export.json               format, embedder, for every part its number of records and checksums, and its own
    part-00001.jsonl          texts, keys, times and counters, one record a line
    part-00001.safetensors    `token_ids` int32 [sum of lengths], `lengths` int64 [n], and with vectors `vectors`
                              float32 [m, dimension] and `places` int64 [m], the indices of their records

An export depends on no machine, store or library. The manifest is written last: without it an export is unfinished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.records import Record, Selection
from precedent.errors import CacheError

FORMAT, VERSION = "precedent-export", 1
MANIFEST = "export.json"
RECORDS_OF_PART = 5000
BYTES_OF_PART = 2**28
"""A part ends with the record that exceeds this."""

KINDS = ("jsonl", "safetensors")
"""The two files of a part, by their endings."""


def export_cache(
    store: CompletionStore,
    folder: Path,
    selection: Selection,
    progress: Callable[[int], None] | None = None,
    *,
    records_of_part: int = RECORDS_OF_PART,
) -> dict[str, Any]:
    """Write the selected records to a new folder that only its owner can read; returns the manifest.

    A part has at most `records_of_part` records; `progress` is called with the number of records of every part. Raises
    CacheError if the folder is not empty or cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CacheError(f"{folder} is not empty; give a new folder")
        return _written(store, folder, _pages(store, selection, records_of_part), progress or (lambda number: None))
    except OSError as error:
        raise CacheError(f"cannot export into {folder}: {error}") from error


def _written(
    store: CompletionStore, folder: Path, pages: Iterable[list[Record]], progress: Callable[[int], None]
) -> dict[str, Any]:
    embedder, parts = store.embedder(), []
    for number, records in enumerate(pages, start=1):
        parts.append(_write_part(folder, f"part-{number:05}", records))
        progress(len(records))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "embedder": None if embedder is None else dataclasses.asdict(embedder),
        "records": sum(part["records"] for part in parts),
        "parts": parts,
    }
    checked = {**manifest, "sha256": checksum_of(manifest)}
    _write(folder / MANIFEST, json.dumps(checked, indent=2, ensure_ascii=False).encode())
    return manifest


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """The manifest's own checksum, over everything else in it."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _pages(store: CompletionStore, selection: Selection, most: int) -> Iterator[list[Record]]:
    last = 0
    while page := store.records(selection, last, most):
        last = page[-1].completion.id
        part, size = list[Record](), 0
        for record in page:
            part.append(record)
            size += 4 * len(record.completion.token_ids) + len(record.completion.text) + len(record.completion.query)
            if size > BYTES_OF_PART:
                yield part
                part, size = [], 0
        if part:
            yield part


def _write_part(folder: Path, name: str, records: Sequence[Record]) -> dict[str, Any]:
    from safetensors.numpy import save

    contents = {"jsonl": b"".join(map(_line, records)), "safetensors": save(_tensors(records))}
    for kind, content in contents.items():
        _write(folder / f"{name}.{kind}", content)
    sums = {kind: hashlib.sha256(content).hexdigest() for kind, content in contents.items()}
    return {"name": name, "records": len(records), "sha256": sums}


def _line(record: Record) -> bytes:
    fields = {
        field.name: getattr(record.completion, field.name)
        for field in dataclasses.fields(record.completion)
        if field.name != "token_ids"
    }
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _tensors(records: Sequence[Record]) -> dict[str, NDArray[Any]]:
    lengths = np.array([len(record.completion.token_ids) for record in records], dtype="<i8")
    tokens = np.array([token for record in records for token in record.completion.token_ids], dtype="<i4")
    held = [(place, record.vector) for place, record in enumerate(records) if record.vector is not None]
    tensors = {"token_ids": tokens, "lengths": lengths}
    if held:
        tensors["places"] = np.array([place for place, _ in held], dtype="<i8")
        tensors["vectors"] = np.stack([vector for _, vector in held]).astype("<f4")
    return tensors


def _write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, and to disk: a power cut must not leave a manifest of missing parts."""
    new = path.with_name(path.name + ".new")
    new.touch(mode=0o600, exist_ok=False)
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
