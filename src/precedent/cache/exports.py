"""Exports a cache as plain files, and imports them into any store, for another tokenizer or embedder if need be.

Records are JSON lines, token ids and vectors safetensors; a manifest lists them.

    export.json               format, embedder, for every part its number of records and checksums, and its own
    part-00001.jsonl          texts, keys, times and counters, one record a line
    part-00001.safetensors    `token_ids` int32 [sum of lengths], `lengths` int64 [n], and with vectors `vectors`
                              float32 [m, dimension] and `places` int64 [m], the indices of their records

An export depends on no machine, store or library. The manifest is written last: without it an export is unfinished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from precedent.cache.embedder import Embedder
from precedent.cache.files import new_file, open_own
from precedent.cache.filling import FillCounts, Vectors, fill
from precedent.cache.records import Completion, Completions, EmbedderIdentity, Selection, Vector, check_tenant
from precedent.cache.redaction import Redact
from precedent.cache.rows import embedder_in
from precedent.cache.store import CompletionStore
from precedent.errors import CacheError, CacheMismatchError
from precedent.runtime.plain_values import first_line, shown

FORMAT, VERSION = "precedent-export", 1
MANIFEST = "export.json"
RECORDS_OF_PART = 5000
BYTES_OF_PART = 2**28
"""A part ends with the record that exceeds this."""

KINDS = ("jsonl", "safetensors")
"""The two files of a part, by their endings."""


NO_TEXT = "no text to write with the new tokenizer"
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
MOST_MANIFEST_BYTES, MOST_PART_BYTES = 2**26, 2**32
"""Larger files are refused before they are read; `export_cache` writes smaller ones."""

_PART = re.compile(r"part-\d{5,9}")
_FIELDS = {one.name: _TYPES[str(one.type)] for one in fields(Completion) if one.name not in ("token_ids", "vector")}


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
    store: CompletionStore, folder: Path, pages: Iterable[Completions], progress: Callable[[int], None]
) -> dict[str, Any]:
    embedder, parts = store.embedder(), []
    for number, records in enumerate(pages, start=1):
        parts.append(_write_part(folder, f"part-{number:05}", records))
        progress(len(records))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "embedder": None if embedder is None else asdict(embedder),
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


def _pages(store: CompletionStore, selection: Selection, most: int) -> Iterator[Completions]:
    last = 0
    while page := store.records(selection, last, most):
        last = page[-1].id
        part, size = Completions(), 0
        for record in page:
            part.append(record)
            size += 4 * len(record.token_ids) + len(record.text) + len(record.query)
            if size > BYTES_OF_PART:
                yield part
                part, size = [], 0
        if part:
            yield part


def _write_part(folder: Path, name: str, records: Sequence[Completion]) -> dict[str, Any]:
    from safetensors.numpy import save

    contents = {"jsonl": b"".join(map(_line, records)), "safetensors": save(_tensors(records))}
    for kind, content in contents.items():
        _write(folder / f"{name}.{kind}", content)
    sums = {kind: hashlib.sha256(content).hexdigest() for kind, content in contents.items()}
    return {"name": name, "records": len(records), "sha256": sums}


def _write(path: Path, content: bytes) -> None:
    """Write a file and wait for the disk: a power cut must not leave a manifest of missing parts."""
    with new_file(path) as file:
        file.write(content)


def _line(record: Completion) -> bytes:
    values = {name: getattr(record, name) for name in _FIELDS}
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"


def _tensors(records: Sequence[Completion]) -> dict[str, NDArray[Any]]:
    lengths = np.array([len(record.token_ids) for record in records], dtype="<i8")
    tokens = np.array([token for record in records for token in record.token_ids], dtype="<i4")
    held = [(place, record.vector) for place, record in enumerate(records) if record.vector is not None]
    tensors = {"token_ids": tokens, "lengths": lengths}
    if held:
        tensors["places"] = np.array([place for place, _ in held], dtype="<i8")
        tensors["vectors"] = np.stack([vector for _, vector in held]).astype("<f4")
    return tensors


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


@dataclass(slots=True)
class _Adapted:
    """Records adapted to the store, with counts of the adaptations."""

    tenant: str | None
    tokenizer: AnswerWriter | None
    read: int = 0
    rewritten: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def of(self, records: Iterator[Completion]) -> Iterator[Completion]:
        for record in records:
            self.read += 1
            completion = record if self.tenant is None else replace(record, tenant=self.tenant)
            if self.tokenizer is None or completion.tokenizer == self.tokenizer.fingerprint:
                yield completion
            elif not completion.text:
                self.skipped[NO_TEXT] += 1
            else:
                self.rewritten += 1
                yield _rewritten(completion, self.tokenizer)


def _rewritten(completion: Completion, tokenizer: AnswerWriter) -> Completion:
    """The same answer in another tokenizer's ids; the recorded model and prompt do not apply to them."""
    ids = tokenizer.answer_ids(completion.text)
    return replace(completion, token_ids=ids, tokenizer=tokenizer.fingerprint, model="", prompt_fingerprint="")


def import_cache(
    folder: Path,
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
    Raises CacheError for an incomplete export, naming the file; what was read before stays stored.
    """
    if tenant is not None:
        check_tenant(tenant)
    manifest = read_manifest(folder)
    adapted, vectors = _Adapted(tenant, tokenizer), Vectors(store, embedder, _embedder_of(manifest))
    filled = fill(store, adapted.of(_records(folder, manifest)), vectors, progress, redact=redact)
    return Imported(adapted.read, adapted.rewritten, filled, dict(adapted.skipped))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an export. Raises CacheError unless there is one that this version reads."""
    try:
        manifest = json.loads(_bytes_of(folder / MANIFEST, MOST_MANIFEST_BYTES))
        if manifest["format"] != FORMAT or manifest["sha256"] != checksum_of(manifest):
            raise ValueError("another format or checksum")
        version = manifest["version"]
        for part in manifest["parts"]:
            _check_part(part)
    except FileNotFoundError as error:
        raise CacheError(f"{folder} is not a finished export: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheError(
            f"{folder / MANIFEST} is not the manifest of an export, or is damaged ({first_line(error)}); export again"
        ) from error
    if version != VERSION:
        raise CacheMismatchError(f"{folder} is an export of format {version}; this version reads {VERSION}")
    return dict(manifest)


def _check_part(part: Mapping[str, Any]) -> None:
    whole = isinstance(part["records"], int) and all(isinstance(part["sha256"][kind], str) for kind in KINDS)
    if not whole or _PART.fullmatch(part["name"]) is None:
        raise ValueError(f"it lists a part that no export has: {shown(part)}")


def _embedder_of(manifest: Mapping[str, Any]) -> EmbedderIdentity | None:
    recorded = manifest.get("embedder")
    found = None if recorded is None else embedder_in(json.dumps(recorded))
    if recorded is not None and found is None:
        raise CacheError(f"the manifest's record of the embedder is damaged: {shown(recorded)}; export again")
    return found


def _records(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Completion]:
    for part in manifest["parts"]:
        texts, tensors = (_content(folder / f"{part['name']}.{kind}", part["sha256"][kind]) for kind in KINDS)
        try:
            yield from _records_of(texts, tensors, part["records"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise CacheError(
                f"{folder / part['name']} does not hold what an export holds: {first_line(error)}; export again"
            ) from error


def _content(path: Path, checksum: str) -> bytes:
    try:
        content = _bytes_of(path, MOST_PART_BYTES)
    except (OSError, ValueError) as error:
        raise CacheError(f"a file of the export is missing or cannot be read: {path}: {error}") from error
    if hashlib.sha256(content).hexdigest() != checksum:
        raise CacheError(f"{path} is not the file that was exported (its checksum differs); export again")
    return content


def _bytes_of(path: Path, most: int) -> bytes:
    """The content of a regular file; raises OSError for a link, pipe or folder, ValueError for a larger file."""
    with os.fdopen(open_own(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size} bytes, and no file of an export has more than {most}")
        return file.read(most)


def _records_of(texts: bytes, content: bytes, number: int) -> Completions:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    _check_tensors(tensors)
    lines, ends = texts.splitlines(), np.cumsum(tensors["lengths"])
    if not len(lines) == len(ends) == number or (number and ends[-1] != tensors["token_ids"].size):
        raise ValueError("its two files disagree about the number of records or tokens")
    vectors = _vectors(tensors, number)
    tokens = np.split(tensors["token_ids"], ends[:-1])
    return [
        _completion(json.loads(line), ids, vector) for line, ids, vector in zip(lines, tokens, vectors, strict=True)
    ]


_KINDS = {"token_ids": ("i4", 1), "lengths": ("i8", 1), "places": ("i8", 1), "vectors": ("f4", 2)}
"""Type and number of dimensions of the arrays of a part; the last two may be missing."""


def _check_tensors(tensors: Mapping[str, NDArray[Any]]) -> None:
    for name, (kind, dimensions) in _KINDS.items():
        array = tensors.get(name)
        if array is None:
            if name in ("token_ids", "lengths"):
                raise ValueError(f"it has no {name}")
        elif (array.dtype.kind + str(array.dtype.itemsize), array.ndim) != (kind, dimensions):
            raise ValueError(f"its {name} have type {array.dtype} and shape {array.shape}")
    lengths = tensors["lengths"]
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= tensors["token_ids"].size:
        raise ValueError("its lengths are not those of its tokens")
    if "vectors" in tensors and not np.isfinite(tensors["vectors"]).all():
        raise ValueError("its vectors hold values that are not finite")


def _vectors(tensors: Mapping[str, NDArray[Any]], number: int) -> list[Vector | None]:
    vectors: list[Vector | None] = [None] * number
    places = tensors.get("places", np.empty(0, dtype=np.int64))
    if places.size and not 0 <= places.min() <= places.max() < number:
        raise ValueError("its vectors belong to records that it does not have")
    for place, vector in zip(places, tensors.get("vectors", ()), strict=True):
        vectors[place] = np.asarray(vector, dtype=np.float32)
    return vectors


def _completion(values: Mapping[str, Any], token_ids: NDArray[Any], vector: Vector | None) -> Completion:
    """A record with checked types, ignoring unknown fields: another program may have written the file."""
    if not isinstance(values, dict):
        raise ValueError(f"a line of it is {shown(values)}, not an object")
    for name, kind in _FIELDS.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise ValueError(f"{name}={shown(values[name])} has the wrong type")
    return Completion(tuple(token_ids.tolist()), **{name: values[name] for name in _FIELDS}, vector=vector)
