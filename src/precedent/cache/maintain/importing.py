"""Imports what `exporting` wrote into any store, optionally for another tokenizer or another embedder."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from precedent.cache.maintain.exporting import FORMAT, KINDS, MANIFEST, VERSION, checksum_of
from precedent.cache.maintain.filling import Filled, Vectors, fill
from precedent.cache.search.embedder import Embedder
from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.records import EmbedderIdentity, Record, StoredCompletion, check_tenant
from precedent.cache.store.redaction import Redact
from precedent.errors import CacheError, CacheMismatchError

NO_TEXT = "no text to write with the new tokenizer"
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_FIELDS = {one.name: _TYPES[str(one.type)] for one in fields(StoredCompletion) if one.name != "token_ids"}


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
    filled: Filled
    skipped: Mapping[str, int]


@dataclass(slots=True)
class _Adapted:
    """Records adapted to the store, with counts of the adaptations."""

    tenant: str | None
    tokenizer: AnswerWriter | None
    read: int = 0
    rewritten: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def of(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self.read += 1
            completion = record.completion if self.tenant is None else replace(record.completion, tenant=self.tenant)
            if self.tokenizer is None or completion.tokenizer == self.tokenizer.fingerprint:
                yield replace(record, completion=completion)
            elif not completion.text:
                self.skipped[NO_TEXT] += 1
            else:
                self.rewritten += 1
                yield replace(record, completion=_rewritten(completion, self.tokenizer))


def _rewritten(completion: StoredCompletion, tokenizer: AnswerWriter) -> StoredCompletion:
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
        manifest = json.loads((folder / MANIFEST).read_bytes())
        assert manifest["format"] == FORMAT
        version = manifest["version"]
        assert manifest["sha256"] == checksum_of(manifest)
        for part in manifest["parts"]:
            _check_part(part)
    except FileNotFoundError as error:
        raise CacheError(f"{folder} is not a finished export: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise CacheError(f"{folder / MANIFEST} is not the manifest of an export, or is damaged") from error
    if version != VERSION:
        raise CacheMismatchError(f"{folder} is an export of format {version}; this version reads {VERSION}")
    return dict(manifest)


def _check_part(part: Mapping[str, Any]) -> None:
    whole = isinstance(part["records"], int) and all(isinstance(part["sha256"][kind], str) for kind in KINDS)
    if not whole or Path(part["name"]).name != part["name"]:
        raise ValueError


def _embedder_of(manifest: Mapping[str, Any]) -> EmbedderIdentity | None:
    recorded = manifest.get("embedder")
    try:
        return None if recorded is None else EmbedderIdentity(**recorded)
    except TypeError as error:
        raise CacheError(f"the manifest's record of the embedder is damaged: {recorded!r}") from error


def _records(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Record]:
    for part in manifest["parts"]:
        texts, tensors = (_content(folder / f"{part['name']}.{kind}", part["sha256"][kind]) for kind in KINDS)
        try:
            yield from _records_of(texts, tensors, part["records"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CacheError(f"{folder / part['name']} does not hold what an export holds: {error}") from error


def _content(path: Path, checksum: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CacheError(f"a file of the export is missing: {error}") from error
    if hashlib.sha256(content).hexdigest() != checksum:
        raise CacheError(f"{path} is not the file that was exported (its checksum differs); export again")
    return content


def _records_of(texts: bytes, content: bytes, number: int) -> list[Record]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    lines, ends = texts.splitlines(), np.cumsum(tensors["lengths"])
    if not len(lines) == len(ends) == number or (number and ends[-1] != tensors["token_ids"].size):
        raise ValueError("its two files disagree about the number of records or tokens")
    vectors = _vectors(tensors, number)
    tokens = np.split(tensors["token_ids"], ends[:-1])
    return [
        Record(_completion(json.loads(line), ids), vector)
        for line, ids, vector in zip(lines, tokens, vectors, strict=True)
    ]


def _vectors(tensors: Mapping[str, NDArray[Any]], number: int) -> list[NDArray[np.float32] | None]:
    vectors: list[NDArray[np.float32] | None] = [None] * number
    for place, vector in zip(tensors.get("places", ()), tensors.get("vectors", ()), strict=True):
        vectors[place] = np.asarray(vector, dtype=np.float32)
    return vectors


def _completion(values: Mapping[str, Any], token_ids: NDArray[Any]) -> StoredCompletion:
    """A record's fields with checked types, ignoring unknown ones: another program may have written the file."""
    for name, kind in _FIELDS.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise ValueError(f"{name}={values[name]!r} has the wrong type")
    return StoredCompletion(tuple(token_ids.tolist()), **{name: values[name] for name in _FIELDS})
