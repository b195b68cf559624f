"""Keys and values of prompts' beginnings on disk: whole files, bounded in bytes and age, in a folder beside a cache.

What a file holds is not known here (`precedent.engine.kept_prefixes` writes and reads it). Each tenant has a folder of
its own. A file's modification time is when it was written, its access time when it was last used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from precedent.cache.store.bounds import Bounds
from precedent.cache.store.database import Database
from precedent.cache.store.files import erase_file, new_file
from precedent.cache.store.records import Selection, digest
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

DEFAULT_MAX_AGE = 30 * 86_400.0
"""Seconds after which a file goes if the cache has no `max_age`."""

ABANDONED = 3_600.0
"""Seconds after which a half-written file is taken for one of a dead process."""

_NEW = ".new"
_FORGOTTEN = "forgotten"
"""A file without content whose modification time is that of the last `forget`."""


class PrefixFiles:
    """The files beside one cache's database; safe for several threads and processes.

    With `read_only` nothing is written or removed. What was copied before a `forget` of any process is not written
    after it: a writer looks at the time of the last one when its unfinished file is there to be erased.
    """

    def __init__(self, database: Path, bounds: Bounds, *, read_only: bool = False) -> None:
        self.path = database.with_name(f"{database.name}-prefixes")
        self.read_only = read_only
        self._max_bytes, self._max_age = bounds.max_prefix_bytes, bounds.max_age or DEFAULT_MAX_AGE

    def create(self) -> None:
        """Make the folder: before anything is copied, so that a `forget` leaves its time there. Raises CacheError."""
        if self.read_only:
            return
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CacheError(f"prefixes cannot be kept in {self.path}: {error}") from error

    def holds(self, tenant: str, name: str) -> bool:
        """Whether a file is there and young enough; counts as a use of it."""
        return self._use(self._file(tenant, name))

    def read(self, tenant: str, name: str) -> bytes | None:
        """A file's content, copied into memory; None if it is missing or too old. Counts as a use of it.

        Check it: while another process erases the file, parts of it are zeros.
        """
        file = self._file(tenant, name)
        try:
            return file.read_bytes() if self._use(file) else None
        except OSError as error:
            logger.info("%s cannot be read: %s", file, error)
            return None

    def write(self, tenant: str, name: str, content: bytes, copied_at: int) -> None:
        """Write a file, whole or not at all, then drop what exceeds the bounds.

        Writes nothing of what was copied (`time.time_ns`) before a `forget`. Raises OSError or CacheError.
        """
        if self.read_only or len(content) > self._max_bytes:
            return
        file = self._file(tenant, name)
        self.create()
        file.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with new_file(file) as opened:
                if self._forgotten_at() >= copied_at:
                    raise FileNotFoundError
                opened.write(content)
        except FileNotFoundError:  # another process erased the unfinished file
            logger.info("%s was forgotten before it was written", file)
        self.sweep()

    def discard(self, tenant: str, name: str) -> None:
        """Remove a file that turned out to be damaged."""
        if not self.read_only:
            _remove(self._file(tenant, name))

    def forget(self, selection: Selection) -> None:
        """Erase what the selection may cover: by tenant and time; not by ids, which are of completions.

        A text cannot be looked for, so a selection by text covers every file that its other conditions cover. Raises
        CacheError if a file stays.
        """
        if selection.ids is not None:
            return
        try:
            if self.path.is_dir():
                self._mark_forgotten()
            for file in self._files(selection.tenant):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    if selection.before is None or file.stat().st_mtime < selection.before:
                        erase_file(file)
        except OSError as error:
            raise CacheError(
                f"the records are forgotten, but {self.path} still holds keys and values ({error}); run forget again "
                "later, or delete that folder"
            ) from error

    def sweep(self) -> None:
        """Remove what is too old or abandoned, then the least recently used until all others fit."""
        if self.read_only:
            return
        now, left = time.time(), list[tuple[float, int, Path]]()
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):  # another process was first
                found = file.stat()
                limit = ABANDONED if file.suffix == _NEW else self._max_age
                if now - found.st_mtime > limit:
                    _remove(file)
                else:
                    left.append((found.st_atime, found.st_size, file))
        size = sum(size for _, size, _ in left)
        for _, freed, file in sorted(left):
            if size <= self._max_bytes:
                return
            _remove(file)
            size -= freed

    def _mark_forgotten(self) -> None:
        now = time.time_ns()
        (self.path / _FORGOTTEN).touch(mode=0o600)
        os.utime(self.path / _FORGOTTEN, ns=(now, now))

    def _forgotten_at(self) -> int:
        try:
            return (self.path / _FORGOTTEN).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _use(self, file: Path) -> bool:
        """Whether a file may be used; notes that it was."""
        try:
            found = file.stat()
        except OSError:
            return False
        if not self.read_only:
            with contextlib.suppress(OSError):  # a file of another user, or one that just went
                os.utime(file, ns=(time.time_ns(), found.st_mtime_ns))
        return found.st_size <= self._max_bytes and time.time() - found.st_mtime <= self._max_age

    def _file(self, tenant: str, name: str) -> Path:
        return self._folder(tenant) / f"{name}.safetensors"

    def _folder(self, tenant: str) -> Path:
        return self.path / digest(bytes_of(tenant), size=16).hex()  # the name reveals nothing about the tenant

    def _files(self, tenant: str | None = None) -> Iterator[Path]:
        """All files, or a tenant's; half-written ones too."""
        folders = [self._folder(tenant)] if tenant is not None else _listed(self.path)
        for folder in folders:
            yield from _listed(folder)


def bytes_of(tenant: str) -> bytes:
    """A tenant's name as bytes, whatever characters it has."""
    return tenant.encode("utf-8", "surrogatepass")


def prefixes_beside(database: Database, bounds: Bounds) -> PrefixFiles | None:
    """The files beside a database; None for one in memory."""
    return None if database.path is None else PrefixFiles(database.path, bounds, read_only=database.read_only)


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        logger.info("%s cannot be removed: %s", file, error)
