"""Who may change the segments of a cache, and when they go: one process at a time, and never later than the rows.

A completion that is forgotten goes from the table first and from the segments then. Whoever seals looks into the table
after it has got the lock, so that no segment can bring back what `forget` has just erased.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from precedent.cache.snapshot.segment_files import ArrayFiles, Sealed, SegmentFiles
from precedent.cache.snapshot.vector_files import VectorFiles
from precedent.cache.store.directory import Directory
from precedent.cache.store.files import bytes_in
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

LOCK_SECONDS = 20.0
"""How long `forget` waits for a process that seals."""

_LOCK = "lock"
_WRITING = "writing"
_VECTORS = "-vectors"


class IndexFolder:
    """The folder beside a cache's file that holds the segments of all its partitions."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self.path = database.with_name(database.name + "-index")

    def files(self, tenant: str, tokenizer: str) -> SegmentFiles:
        """The segments of one partition; its folder's name tells nothing about the tenant."""
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
        return sorted(path for path in self.path.iterdir() if path.is_dir()) if self.path.is_dir() else []

    @contextlib.contextmanager
    def alone(self, seconds: float = 0.0) -> Iterator[bool]:
        """True for the only one, of all threads and processes, that may write now; False when that is another one.

        What one before left half-made is erased first: a mark is there from its beginning to its good end.
        """
        self.path.mkdir(mode=self._mode() | 0o100 | (self._mode() & 0o044) >> 2, exist_ok=True)
        lock = FileLock(self.path / _LOCK, mode=self._mode())
        try:
            lock.acquire(timeout=seconds)
        except Timeout:
            yield False
            return
        try:
            self._erase_half_made()
            with contextlib.suppress(OSError):  # no room for it: what is left is erased by the partition's next seal
                self._mark.touch(mode=self._mode())
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
        """Erase from all segments what is no longer in the table, by a `look` at it once nobody else can seal.

        Raises CacheError when that cannot be done now.
        """
        if not self.path.is_dir():
            return
        try:
            with self.alone(LOCK_SECONDS) as alone:
                if not alone:
                    raise CacheError(self._not_erased("another process is writing there"))
                alive = look()
                for files in [*self.all_files(), *self.all_vector_files()]:
                    without_gone(files, alive)
        except OSError as error:
            raise CacheError(self._not_erased(str(error))) from error

    def sweep(self) -> None:
        """Erase what a process left here that was killed while it sealed; nothing where another one is writing."""
        if not self._mark.exists():
            return
        try:
            with self.alone():
                pass
        except OSError as error:  # a full disk, a folder of somebody else: whoever writes next tries again
            logger.info("what was left half-made in %s stays there: %s", self.path, error)

    def size(self) -> int:
        """Bytes of all files in it."""
        return sum(bytes_in(file) for file in self.path.rglob("*") if file.is_file())

    def _not_erased(self, reason: str) -> str:
        return (
            f"the records are forgotten, but {self.path} still holds their tokens ({reason}); run forget once more "
            "later, or delete that folder while no process uses the cache"
        )

    def _mode(self) -> int:
        """Whoever may read the cache may read its segments, and nobody else."""
        return self._database.stat().st_mode & 0o666


def without_gone(files: ArrayFiles, alive: Directory, damaged: Container[str] = ()) -> list[Sealed]:
    """Rewrite what holds a completion that is gone, erase what it replaces; returns what counts.

    `damaged` names segments that go as a whole. For the one who is alone.
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
