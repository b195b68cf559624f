"""Checks every byte of a cache, and repairs what can be repaired.

The table is the source of truth. Records whose bytes have changed are dropped; sums, indexes and segments are rebuilt
from the records. Opening a cache checks less, because it has to be fast.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from precedent.cache.maintain.salvage import salvage
from precedent.cache.snapshot.sealing import LOCK_SECONDS, IndexFolder, without_gone
from precedent.cache.snapshot.segment import Segment
from precedent.cache.snapshot.segment_files import ArrayFiles, Sealed, SegmentFiles
from precedent.cache.snapshot.vector_files import VectorFiles
from precedent.cache.store import rows
from precedent.cache.store.database import Database
from precedent.cache.store.directory import directory_of_all, read_by_ids
from precedent.cache.store.files import database_path
from precedent.cache.store.inspection import RepairableError, inspecting
from precedent.cache.store.report import Finding, VerifyReport
from precedent.errors import CacheError

RECORDS_AT_ONCE = 1000


def verify_cache(path: str | Path, *, repair: bool = False) -> VerifyReport:
    """Check structure, records, vectors, sums and segments of a cache; with `repair`, mend the findings.

    Repairing loses only damaged records. A file with a damaged structure is rewritten from the readable records, and
    kept beside the new one. Raises CacheError if there is no cache, or if it cannot be repaired now.
    """
    file = database_path(path)
    if not file.exists():
        raise CacheError(f"there is no cache at {file}")
    found: list[Finding] = []
    refusal = _refusal_of(file)
    if refusal is not None and not repair:
        if not refusal.surely_a_cache:
            raise refusal
        return VerifyReport(str(file), 0, (Finding("structure", refusal.reason),))
    if refusal is not None:
        found.append(Finding("structure", f"{refusal.reason}: {salvage(file, refusal)}", repaired=True))
    try:
        with closing(Database(file, read_only=not repair)) as database:
            checked = _Check(database, repair)
            found += checked.findings()
            return VerifyReport(str(file), checked.records, tuple(found))
    except (OSError, sqlite3.Error) as error:
        raise CacheError(f"cannot verify {file}: {error}") from error


def _refusal_of(file: Path) -> RepairableError | None:
    """Why the file cannot be used as it is; None if its structure is sound."""
    try:
        with inspecting(file, whole=True):
            return None
    except RepairableError as error:
        return error


class _Check:
    """One pass over an open cache whose structure is sound."""

    def __init__(self, database: Database, repair: bool) -> None:
        self._database, self._repair = database, repair
        self.records = 0
        self._damaged: list[int] = []

    def findings(self) -> Iterator[Finding]:
        """All findings; with `repair`, each is mended before the next one is returned."""
        yield from self._embedder()
        damaged = list(self._records())
        yield from damaged
        if self._repair or not damaged:  # sums over damaged records mean nothing
            yield from self._sums()
        yield from self._segments()
        yield from self._vectors()

    def _embedder(self) -> Iterator[Finding]:
        try:
            with self._database.read() as connection:
                rows.recorded_embedder(connection)
        except CacheError:
            if self._repair:
                self._without_vectors()
            yield Finding("embedder", "the record of the embedder is damaged, so no vector can be used", self._repair)

    def _without_vectors(self) -> None:
        with self._database.write() as connection:
            connection.execute(f"{rows.DROP_VECTOR} WHERE vector IS NOT NULL OR vector_checksum IS NOT NULL")
            connection.execute("DELETE FROM meta WHERE key = 'embedder'")
            rows.count_again(connection)

    def _records(self) -> Iterator[Finding]:
        last, records, vectors = 0, self._damaged, list[int]()
        query = f"SELECT {rows.COLUMNS}, vector, vector_checksum FROM completion WHERE id > ? ORDER BY id LIMIT ?"
        while True:
            with self._database.read() as connection:
                page = connection.execute(query, (last, RECORDS_AT_ONCE)).fetchall()
            if not page:
                break
            for *row, vector, checksum in page:
                last = row[rows.ID]
                if rows.completion_of(tuple(row)) is None:
                    records.append(last)
                elif (vector, checksum) != (None, None) and rows.vector_of(vector, checksum) is None:
                    vectors.append(last)
                self.records += not records or records[-1] != last
        if self._repair and (records or vectors):
            self._drop(records, vectors)
        yield from (Finding("record", f"record {i} is damaged", self._repair, (i,)) for i in records)
        yield from (Finding("vector", f"the vector of record {i} is damaged", self._repair, (i,)) for i in vectors)

    def _drop(self, records: list[int], vectors: list[int]) -> None:
        with self._database.write() as connection:
            connection.executemany("DELETE FROM completion WHERE id = ?", [(i,) for i in records])
            connection.executemany(f"{rows.DROP_VECTOR} WHERE id = ?", [(i,) for i in vectors])
            rows.count_again(connection)

    def _sums(self) -> Iterator[Finding]:
        with self._database.read() as connection:
            differ = _sums_differ(connection)
        if differ and self._repair:
            with self._database.write() as connection:
                rows.count_again(connection)
        if differ:
            yield Finding("sums", "the sums by tenant do not match the records", self._repair)

    def _segments(self) -> Iterator[Finding]:
        assert self._database.path is not None
        index = IndexFolder(self._database.path)
        for files in index.all_files():
            if not files.has_sound_manifest():
                if self._repair:
                    self._without(index, files, set())
                yield Finding("segment", f"{files.folder.name} has an unreadable manifest", self._repair)
            damaged = {sealed.name: reason for sealed in files.listed() if (reason := self._wrong(files, sealed))}
            if damaged and self._repair:
                self._without(index, files, set(damaged))
            for name, reason in damaged.items():
                yield Finding("segment", f"segment {name} in {files.folder.name} {reason}", self._repair)

    def _vectors(self) -> Iterator[Finding]:
        assert self._database.path is not None
        index = IndexFolder(self._database.path)
        for files in index.all_vector_files():
            damaged = {sealed.name for sealed in files.listed() if self._wrong_vectors(files, sealed)}
            if damaged or not files.has_sound_manifest():
                if self._repair:
                    self._without(index, files, damaged)
                yield Finding("segment", f"vectors in {files.folder.name} differ from the table", self._repair)

    def _wrong_vectors(self, files: VectorFiles, sealed: Sealed) -> bool:
        """Whether sealed vectors cannot be read, or differ from the records that they name."""
        grouped = files.read_set(sealed)
        if grouped is None:
            return sealed in files.listed()
        held = {row_id: place for place, row_id in enumerate(grouped.entries["id"].tolist())}
        return any(
            rows.vector_of(blob, checksum) is not None
            and int.from_bytes(checksum, "little") == grouped.entries["checksum"][held[row_id]]
            and not np.array_equal(np.frombuffer(blob, "<f4").astype(np.float16), grouped.vectors[held[row_id]])
            for row_id, blob, checksum in read_by_ids(
                self._database, "id, vector, vector_checksum", np.sort(grouped.entries["id"])
            )
        )

    def _wrong(self, files: SegmentFiles, sealed: Sealed) -> str | None:
        """What is wrong with a segment; one that still holds removed records is merely outdated, not wrong."""
        segment = files.read(sealed)
        if segment is None:
            return None if sealed not in files.listed() else "cannot be read"
        return "holds other tokens than the table" if self._contradicts(segment) else None

    def _contradicts(self, segment: Segment) -> bool:
        """Whether a record that still has the segment's checksum has other tokens in the table."""
        ends = np.append(segment.completions["begin"], segment.tokens.size)
        tokens = {i: segment.tokens[b + 1 : e] for i, b, e in zip(segment.ids.tolist(), ends, ends[1:], strict=False)}
        sums = dict(zip(segment.ids.tolist(), segment.completions["checksum"].tolist(), strict=True))
        whole = np.setdiff1d(segment.ids, self._damaged)
        return any(
            int.from_bytes(checksum, "little") == sums[row_id]
            and np.frombuffer(blob, "<i4").tolist() != tokens[row_id].tolist()
            for row_id, checksum, blob in read_by_ids(self._database, "id, checksum, token_ids", whole)
        )

    def _without(self, index: IndexFolder, files: ArrayFiles, damaged: set[str]) -> None:
        with index.alone(LOCK_SECONDS) as alone:
            if not alone:
                raise CacheError(f"another process is writing in {index.path}; run verify again later")
            without_gone(files, directory_of_all(self._database), damaged)


def _sums_differ(connection: sqlite3.Connection) -> bool:
    connection.execute("BEGIN")  # read both at one moment, even during writes
    try:
        kept = connection.execute("SELECT tenant, bytes, records FROM usage ORDER BY tenant").fetchall()
        counted = connection.execute(f"{rows.COUNTED} ORDER BY tenant").fetchall()
        wrong = connection.execute(f"SELECT 1 FROM completion WHERE {rows.WRONG_SIZE}").fetchone()
        return kept != counted or wrong is not None
    finally:
        connection.execute("COMMIT")
