"""An overview of a partition's rows: enough to tell which completions exist, without reading their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.cache.store import rows
from precedent.cache.store.arrays import Ids, Mask
from precedent.cache.store.database import Database
from precedent.cache.store.records import StoredCompletion

ROWS_AT_ONCE = 2000
"""Rows read under one lock, so that a waiting request waits a few milliseconds at most."""

# as BLOB, not TEXT: a Python function would decode every text
_GLANCE = f"""
SELECT id, checksum, max(1, {rows.as_number("count")}), coalesce(CAST(prompt_fingerprint AS BLOB), x'') FROM completion
WHERE tenant = ? AND tokenizer = ? AND id > ? ORDER BY id LIMIT ?
"""
_LENGTHS = f"""
SELECT id, {rows.as_number("num_tokens")} FROM completion
WHERE tenant = ? AND tokenizer = ? AND id > ? ORDER BY id LIMIT ?
"""
_ALL = "SELECT id, checksum, vector_checksum FROM completion WHERE id > ? ORDER BY id LIMIT ?"
_VECTORS = """
SELECT id, vector_checksum FROM completion WHERE tenant = ? AND tokenizer = ? AND id > ? ORDER BY id LIMIT ?
"""


Checksums = NDArray[np.uint64]


class Directory(NamedTuple):
    """Completions in order of their ids: checksums of the rows, write-back counts and prompt fingerprints, all `[n]`.

    For a whole cache, only ids, checksums and the vectors' checksums (0 without a vector) are filled in.
    """

    ids: Ids
    checksums: Checksums
    counts: Ids
    prompts: list[bytes]
    vector_checksums: Checksums

    def holds(self, completions: NDArray[np.void]) -> Mask:
        """For each of a segment's completions, whether its row still exists unchanged."""
        return _agree(self.ids, self.checksums, completions)

    def holds_vectors(self, entries: NDArray[np.void]) -> Mask:
        """The same for the entries of sealed vectors."""
        return _agree(self.ids, self.vector_checksums, entries)

    def checksums_of(self, ids: Ids) -> Checksums:
        """The checksums of these rows; 0 for missing ones."""
        return _at(self.ids, self.checksums, ids)

    def vector_checksums_of(self, ids: Ids) -> Checksums:
        """The checksums of the vectors in these rows; 0 for missing ones."""
        return _at(self.ids, self.vector_checksums, ids)


def _agree(ids: Ids, checksums: Checksums, held: NDArray[np.void]) -> Mask:
    return np.asarray((_at(ids, checksums, held["id"]) == held["checksum"]) & np.isin(held["id"], ids))


def _at(ids: Ids, checksums: Checksums, wanted: Ids) -> Checksums:
    """The checksums of `wanted` among increasing `ids`; 0 for missing ones."""
    if not ids.size:
        return np.zeros(wanted.size, dtype=np.uint64)
    places = np.minimum(np.searchsorted(ids, wanted), ids.size - 1)
    return np.where(ids[places] == wanted, checksums[places], np.uint64(0))


def directory_of(database: Database, tenant: str, tokenizer: str) -> Directory:
    """The rows of one partition."""
    ids, sums, counts, prompts = _columns(database, _GLANCE, (tenant, tokenizer), 4)
    return Directory(_as_ids(ids), _as_numbers(sums), _as_ids(counts), list(prompts), _as_numbers(()))


def directory_of_all(database: Database) -> Directory:
    """Ids and checksums of all rows of the cache."""
    ids, sums, vectors = _columns(database, _ALL, (), 3)
    return Directory(_as_ids(ids), _as_numbers(sums), _as_ids(()), [], _as_numbers(vectors))


def vector_directory_of(database: Database, tenant: str, tokenizer: str) -> Directory:
    """The ids of one partition's rows and the checksums of their vectors."""
    ids, vectors = _columns(database, _VECTORS, (tenant, tokenizer), 2)
    return Directory(_as_ids(ids), _as_numbers(()), _as_ids(()), [], _as_numbers(vectors))


def lengths_of(database: Database, tenant: str, tokenizer: str) -> tuple[Ids, Ids]:
    """The ids of a partition's rows in increasing order, and the number of tokens of each."""
    ids, lengths = _columns(database, _LENGTHS, (tenant, tokenizer), 2)
    return _as_ids(ids), _as_ids(lengths)


def payload_bytes(database: Database, tenant: str) -> int:
    """Bytes of everything that a tenant has stored, tokens (4 bytes each) included; takes microseconds."""
    with database.read() as connection:
        found = connection.execute(
            f"SELECT {rows.as_number('bytes')} FROM usage WHERE tenant = ?", (tenant,)
        ).fetchone()
    return int(found[0]) if found else 0


def _columns(database: Database, query: str, values: tuple[str, ...], width: int) -> tuple[Sequence[Any], ...]:
    """The results, column by column, of a query that pages by increasing ids."""
    columns: tuple[list[Any], ...] = tuple([] for _ in range(width))
    last, more = 0, True
    while more:
        with database.read() as connection:
            page = connection.execute(query, (*values, last, ROWS_AT_ONCE)).fetchall()
        for column, found in zip(columns, zip(*page, strict=True), strict=False):  # an empty page has no columns
            column.extend(found)
        more = len(page) == ROWS_AT_ONCE
        last = page[-1][0] if page else last
    return columns


def _as_ids(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, dtype=np.int64)


def read_completions(database: Database, tenant: str, tokenizer: str, ids: Ids) -> list[StoredCompletion]:
    """These completions of a partition in order of their ids, without damaged or missing ones."""
    found = read_by_ids(database, rows.COLUMNS, ids, "tenant = ? AND tokenizer = ?", (tenant, tokenizer))
    return [completion for row in found if (completion := rows.completion_of(row)) is not None]


def read_by_ids(
    database: Database, columns: str, ids: Ids, where: str = "1", values: tuple[str, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """The existing rows with these ids that meet a condition, in order of their ids."""
    query = f"SELECT {columns} FROM completion WHERE {where} AND id IN (SELECT value FROM json_each(?)) ORDER BY id"
    for begin in range(0, ids.size, ROWS_AT_ONCE):
        wanted = json.dumps(ids[begin : begin + ROWS_AT_ONCE].tolist())
        with database.read() as connection:
            found = connection.execute(query, (*values, wanted)).fetchall()
        yield from found


def _as_numbers(checksums: Sequence[Any]) -> Checksums:
    """Checksums as numbers; 0 for one of another length or type, which a damaged row may have."""
    sound = set(map(type, checksums)) <= {bytes} and set(map(len, checksums)) <= {8}
    whole = checksums if sound else [one if isinstance(one, bytes) and len(one) == 8 else bytes(8) for one in checksums]
    return np.frombuffer(b"".join(whole), dtype="<u8").astype(np.uint64)
