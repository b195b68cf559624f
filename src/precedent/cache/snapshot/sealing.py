"""Locks and cleans the segments of a cache: one process writes at a time, and erased rows leave the segments too.

`forget` erases a completion from the table first and from the segments next. A process that seals reads the table only
after it has the lock, so no segment can bring back what `forget` has just erased.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from precedent.cache.snapshot.segment_files import ArrayFiles, Sealed, SegmentFiles
from precedent.cache.snapshot.vector_files import VectorFiles
from precedent.cache.store.directory import Directory
from precedent.cache.store.files import is_own_folder, touch_own
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

LOCK_SECONDS = 20.0
"""How long `forget` waits for a process that seals."""

_LOCK = "lock"
_WRITING = "writing"
_VECTORS = "-vectors"
_OWN = re.compile(rf"[0-9a-f]{{32}}({_VECTORS})?")
"""The names of folders that `_key` gives."""


class IndexFolder:
    """The folder beside a cache's file that holds the segments of all its partitions."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self.path = database.with_name(database.name + "-index")

    def files(self, tenant: str, tokenizer: str) -> SegmentFiles:
        """The segments of one partition; the folder's name reveals nothing about the tenant."""
        return SegmentFiles(self.path / _key(tenant, tokenizer), self._mode())

    def vector_files(self, tenant: str, tokenizer: str) -> VectorFiles:
        """The sealed vectors of one partition."""
        return VectorFiles(self.path / (_key(tenant, tokenizer) + _VECTORS), self._mode())

    def all_files(self) -> list[SegmentFiles]:
        """The segments of every partition."""
        return [SegmentFiles(folder, self._mode()) for folder in self._folders() if not _holds_vectors(folder)]

    def all_vector_files(self) -> list[VectorFiles]:
        """The sealed vectors of every partition."""
        return [VectorFiles(folder, self._mode()) for folder in self._folders() if _holds_vectors(folder)]

    def _folders(self) -> list[Path]:
        """The folders that Precedent made. Raises CacheError if one of them, or their parent, is a link."""
        if not is_own_folder(self.path):
            return []
        return sorted(path for path in self.path.iterdir() if _OWN.fullmatch(path.name) and is_own_folder(path))

    @contextlib.contextmanager
    def alone(self, seconds: float = 0.0) -> Iterator[bool]:
        """Yields True to the one thread or process that may write now, and False to all others.

        First erases what an interrupted writer left: a marker file exists from the start of a write to its end.
        """
        if not is_own_folder(self.path):
            self.path.mkdir(mode=self._mode() | 0o100 | (self._mode() & 0o044) >> 2, exist_ok=True)
        touch_own(self.path / _LOCK, self._mode())  # a lock through a link would empty the file that it names
        lock = FileLock(self.path / _LOCK, mode=self._mode())
        try:
            lock.acquire(timeout=seconds)
        except Timeout:
            yield False
            return
        try:
            self._erase_half_made()
            with contextlib.suppress(OSError):  # no room for the marker: the partition's next seal erases leftovers
                touch_own(self._mark, self._mode())
            yield True
            self._mark.unlink(missing_ok=True)
        finally:
            lock.release()

    @property
    def _mark(self) -> Path:
        return self.path / _WRITING

    def _erase_half_made(self) -> None:
        if self._mark.exists():
            for files in [*self.all_files(), *self.all_vector_files()]:
                if files.has_sound_manifest():
                    files.erase_unlisted()

    def erase_gone(self, look: Callable[[], Directory]) -> None:
        """Erase from all segments what is no longer in the table, which `look` reads once the lock is held.

        Raises CacheError if that is not possible now.
        """
        if not is_own_folder(self.path):
            return
        try:
            with self.alone(LOCK_SECONDS) as alone:
                if not alone:
                    raise CacheError(self._not_erased("another process is writing there"))
                alive = look()
                for files in [*self.all_files(), *self.all_vector_files()]:
                    _erase_gone(files, alive)
        except OSError as error:
            raise CacheError(self._not_erased(str(error))) from error

    def sweep(self) -> None:
        """Erase what a process left that was killed while sealing; does nothing while another one is writing.

        Raises CacheError if the folder is a link.
        """
        if not is_own_folder(self.path) or not self._mark.exists():
            return
        try:
            with self.alone():
                pass
        except OSError as error:  # a full disk or a folder of another user: the next writer tries again
            logger.info("unfinished files in %s stay there: %s", self.path, error)

    def size(self) -> int:
        """Bytes of all files in the folder."""
        return sum(file.lstat().st_size for folder in self._folders() for file in folder.iterdir())

    def _not_erased(self, reason: str) -> str:
        return (
            f"the records are forgotten, but {self.path} still holds their tokens ({reason}); run forget again "
            "later, or delete that folder while no process uses the cache"
        )

    def _mode(self) -> int:
        """File mode of the segments: readable by exactly those who can read the cache."""
        return self._database.stat().st_mode & 0o666


def _erase_gone(files: ArrayFiles, alive: Directory) -> None:
    """Erase what is gone; without room for a smaller set, everything: it is sealed again from the table."""
    try:
        without_gone(files, alive)
    except OSError as error:
        logger.info("the index in %s is erased, and made again later: %s", files.folder, error)
        files.erase()


def without_gone(files: ArrayFiles, alive: Directory, damaged: Container[str] = ()) -> list[Sealed]:
    """Rewrite the sets that hold removed completions, and erase the old ones; returns the sets that remain.

    Sets named in `damaged` are dropped entirely. Call it with the lock held.
    """
    listed = files.listed()
    whole = [one for one in listed if one.name not in damaged]
    left = [sealed for one in whole if (sealed := _without_gone(files, one, alive)) is not None]
    if left != listed:
        files.publish(left)
    files.erase_unlisted()
    return left


def _without_gone(files: ArrayFiles, sealed: Sealed, alive: Directory) -> Sealed | None:
    stays = files.held_by(alive, sealed)
    if not stays.any():
        return None
    return sealed if stays.all() else files.without_gone(sealed, stays)


def _key(tenant: str, tokenizer: str) -> str:
    return hashlib.blake2b(repr((tenant, tokenizer)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _holds_vectors(folder: Path) -> bool:
    return folder.name.endswith(_VECTORS)
