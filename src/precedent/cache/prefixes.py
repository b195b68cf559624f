"""KV cache of prompt prefixes on disk: whole files, bounded in bytes and age, in a folder beside a cache.

What a file holds is not known here (`precedent.engine.kept_prefixes` writes and reads it). Each tenant has a folder of
its own. A file's modification time is when it was written, its access time when it was last used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from precedent.cache.files import ABANDONED, NEW_FILE, erase_file, is_own_folder, new_file, read_own
from precedent.cache.records import Bounds, Selection, digest
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

DEFAULT_MAX_AGE = 30 * 86_400.0
"""Seconds after which a file goes if the cache has no `max_age`."""

_NEW = ".new"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(rf"\w+\.safetensors|{NEW_FILE.pattern}")
"""The names that are given here; nothing else in these folders is touched."""


class PrefixFiles:
    """The files beside one cache's database; safe for several threads and processes.

    With `read_only` nothing is written or removed. `generation` tells how often any process has called `forget` on the
    cache. What was copied before a `forget` is not written after it: a writer compares generations when its unfinished
    file is there to be erased. Links and other files that Precedent does not make are refused by name.
    """

    def __init__(
        self, database: Path, bounds: Bounds, generation: Callable[[], int], *, read_only: bool = False
    ) -> None:
        self.path = database.with_name(f"{database.name}-prefixes")
        self.read_only, self.generation = read_only, generation
        self._max_bytes, self._max_age = bounds.max_prefix_bytes, bounds.max_age or DEFAULT_MAX_AGE

    def holds(self, tenant: str, name: str) -> bool:
        """Return whether a file is there and young enough; counts as a use of it."""
        return self._use(self._file(tenant, name))

    def read(self, tenant: str, name: str) -> bytes | None:
        """A file's content, copied into memory; None if it is missing or too old. Counts as a use of it.

        Check it: while another process erases the file, parts of it are zeros.
        """
        file = self._file(tenant, name)
        try:
            return read_own(file) if self._use(file) else None
        except OSError as error:
            logger.info("%s cannot be read: %s", file, error)
            return None

    def write(self, tenant: str, name: str, content: bytes, generation: int) -> None:
        """Write a file, whole or not at all, then drop what exceeds the bounds.

        `generation` is the one in which the content was copied; writes nothing after a `forget` since. Raises OSError
        or CacheError.
        """
        if self.read_only or len(content) > self._max_bytes:
            return
        file = self._file(tenant, name)
        for folder in (self.path, file.parent):
            if not is_own_folder(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with new_file(file) as opened:
                if self.generation() != generation:
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

        Call it after the new generation is recorded, so that no writer brings back what is erased here.
        A text cannot be looked for, so a selection by text covers every file that its other conditions cover. Raises
        CacheError if a file stays.
        """
        if selection.ids is not None:
            return
        try:
            for _ in range(2):  # a file that got its name during the first pass is there in the second
                for file in self._files(selection.tenant):
                    with contextlib.suppress(FileNotFoundError):  # another process was first
                        if selection.before is None or file.lstat().st_mtime < selection.before:
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
                found = file.lstat()
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

    def _use(self, file: Path) -> bool:
        """Return whether a file may be used, and note that it was."""
        try:
            found = file.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or not is_own_folder(file.parent) or not is_own_folder(self.path):
            return False
        if not self.read_only:
            with contextlib.suppress(OSError):  # a file of another user, or one that just went
                os.utime(file, ns=(time.time_ns(), found.st_mtime_ns), follow_symlinks=False)
        return found.st_size <= self._max_bytes and time.time() - found.st_mtime <= self._max_age

    def _file(self, tenant: str, name: str) -> Path:
        return self._folder(tenant) / f"{name}.safetensors"

    def _folder(self, tenant: str) -> Path:
        return self.path / digest(bytes_of(tenant), size=16).hex()  # the name reveals nothing about the tenant

    def _files(self, tenant: str | None = None) -> Iterator[Path]:
        folders = [self._folder(tenant)] if tenant is not None else _listed(self.path, _FOLDER)
        if is_own_folder(self.path):
            for folder in folders:
                yield from _listed(folder, _FILE)


def bytes_of(tenant: str) -> bytes:
    """A tenant's name as bytes, whatever characters it has."""
    return tenant.encode("utf-8", "surrogatepass")


def _listed(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """List the files that Precedent made in a folder. Raises CacheError if the folder is a link."""
    return sorted(path for path in folder.iterdir() if names.fullmatch(path.name)) if is_own_folder(folder) else []


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        logger.info("%s cannot be removed: %s", file, error)
