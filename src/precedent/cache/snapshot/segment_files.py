"""Arrays on disk: a few `.npy` files, each written completely or not at all, and a manifest that lists the valid ones.

Nothing here is trusted or needed, because the rows in SQLite are the source of truth: an array that is missing, torn,
in another format or different from its manifest is left out. Files are copied into memory when they are read, so a
file that shrinks or changes later can neither crash nor mislead a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from precedent.cache.snapshot.segment import COMPLETION, TOKEN, Segment, is_sound, kept
from precedent.cache.store.arrays import Mask
from precedent.cache.store.directory import Directory
from precedent.cache.store.files import (
    NEW_FILE,
    erase_file,
    is_own_folder,
    new_file,
    open_own,
    read_own,
    wait_for_folder,
)

logger = logging.getLogger("precedent.cache")

FORMAT = 1
MANIFEST = "manifest.json"

_OWN = re.compile(rf"{re.escape(MANIFEST)}|[0-9a-f]{{16}}\.\w+\.npy|{NEW_FILE.pattern}")
"""The names of files that are written here."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A set of arrays as the manifest lists it: its completions, tokens or values, and a checksum per file."""

    name: str
    completions: int
    tokens: int
    checksums: dict[str, str]


class ArrayFiles(ABC):
    """Sets of arrays in one folder, each array in a file `NAME.PART.npy`.

    Reading needs no lock; writing needs the lock of the whole index (`precedent.cache.snapshot.sealing`).
    """

    parts: ClassVar[dict[str, np.dtype[Any]]]
    """The arrays of a set by name; the first identifies its completions by the fields `id` and `checksum`."""

    def __init__(self, folder: Path, file_mode: int = 0o600) -> None:
        self.folder, self._mode = folder, file_mode

    def listed(self) -> list[Sealed]:
        """The sets in the manifest, oldest first; none if there is no readable manifest."""
        try:
            return self._listed()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.info("the index in %s is rebuilt: %s", self.folder, error)
            return []

    def has_sound_manifest(self) -> bool:
        """Whether the manifest is readable, or there is none yet."""
        try:
            self._listed()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        return True

    def _listed(self) -> list[Sealed]:
        try:
            manifest = json.loads(read_own(self.folder / MANIFEST))
        except FileNotFoundError:
            return []
        return [self._sealed(entry) for entry in manifest["segments"]] if manifest["format"] == FORMAT else []

    def read_arrays(self, sealed: Sealed) -> Arrays:
        """The arrays of a set in memory. Raises OSError or ValueError unless they are exactly what was sealed."""
        with ThreadPoolExecutor(len(self.parts)) as readers:  # reading and checksums release the GIL
            arrays = readers.map(partial(self._array, sealed), self.parts)
            return dict(zip(self.parts, arrays, strict=True))

    def completions(self, sealed: Sealed) -> NDArray[np.void]:
        """The completions in a set; none if they cannot be read."""
        first = next(iter(self.parts))
        try:
            return self._array(sealed, first)
        except (OSError, ValueError):
            return np.empty(0, self.parts[first])

    def _array(self, sealed: Sealed, part: str) -> NDArray[Any]:
        """One array, read rather than mapped: if another process truncated a mapped file, this one would crash."""
        with os.fdopen(open_own(self._file(sealed.name, part)), "rb") as file:
            shape, dtype = _header(file, part)
            if dtype != self.parts[part] or len(shape) != 1:
                raise ValueError(f"its {part} have the wrong type")
            if shape[0] * dtype.itemsize != os.fstat(file.fileno()).st_size - file.tell():
                raise ValueError(f"its {part} do not match the size in their header")
            array = np.fromfile(file, dtype, shape[0])
        if _checksum(array) != sealed.checksums[part]:
            raise ValueError(f"its {part} have another checksum")
        return array

    def write_arrays(self, arrays: Arrays, completions: int, tokens: int) -> Sealed:
        """Write a set's files and wait for the disk; the set is valid once `publish` lists it."""
        self._make_folder()
        name = secrets.token_hex(8)
        for part, array in arrays.items():
            with new_file(self._file(name, part), self._mode) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array, dtype=self.parts[part]), allow_pickle=False)
        return Sealed(name, completions, tokens, {part: _checksum(array) for part, array in arrays.items()})

    def publish(self, segments: Iterable[Sealed]) -> None:
        """Make exactly these sets valid, durably even after a power cut."""
        entries = [asdict(sealed) for sealed in segments]
        self._make_folder()
        with new_file(self.folder / MANIFEST, self._mode) as file:
            file.write(json.dumps({"format": FORMAT, "segments": entries}, indent=1).encode())
        wait_for_folder(self.folder)

    def _make_folder(self) -> None:
        if not is_own_folder(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=_folder_mode(self._mode))

    def erase_unlisted(self) -> None:
        """Overwrite and delete every file that the manifest does not list; without segments, delete the folder too.

        Raises OSError if a file can be neither overwritten nor deleted.
        """
        segments = self.listed()
        wanted = {self._file(sealed.name, part).name for sealed in segments for part in self.parts}
        self._erase_but(wanted | {MANIFEST} if segments else set())

    def erase(self) -> None:
        """Overwrite and delete every file, and the folder. Raises OSError."""
        self._erase_but(set())

    def _erase_but(self, wanted: set[str]) -> None:
        if not is_own_folder(self.folder):
            return
        for file in sorted(self.folder.iterdir()):
            if file.name not in wanted and _OWN.fullmatch(file.name):
                erase_file(file)
        if not wanted:
            with contextlib.suppress(OSError):  # something that is not Precedent's is in it
                self.folder.rmdir()

    def _file(self, name: str, part: str) -> Path:
        return self.folder / f"{name}.{part}.npy"

    def held_by(self, alive: Directory, sealed: Sealed) -> Mask:
        """For each completion of a set, whether its row still exists unchanged."""
        return alive.holds(self.completions(sealed))

    @abstractmethod
    def without_gone(self, sealed: Sealed, stays: Mask) -> Sealed | None:
        """Write what stays of a set as a new set; None if it cannot be read."""

    def _sealed(self, entry: dict[str, Any]) -> Sealed:
        sealed = Sealed(str(entry["name"]), int(entry["completions"]), int(entry["tokens"]), dict(entry["checksums"]))
        if not sealed.name.isalnum() or set(sealed.checksums) != set(self.parts):
            raise ValueError("a segment's entry in the manifest is damaged")
        return sealed


class SegmentFiles(ArrayFiles):
    """The segments of one partition."""

    parts: ClassVar = {"completions": COMPLETION, "tokens": TOKEN, "order": TOKEN}

    def read(self, sealed: Sealed) -> Segment | None:
        """The segment in memory; None unless it is exactly what was sealed."""
        try:
            segment = Segment(**self.read_arrays(sealed))
            sizes = (segment.completions.size, segment.tokens.size)
            if sizes != (sealed.completions, sealed.tokens) or not is_sound(segment):
                raise ValueError("it differs from its manifest")
            return segment
        except (OSError, ValueError) as error:
            logger.info("segment %s in %s is rebuilt: %s", sealed.name, self.folder, error)
            return None

    def write(self, segment: Segment) -> Sealed:
        """Write a segment; it is valid once `publish` lists it."""
        return self.write_arrays(segment._asdict(), segment.completions.size, segment.tokens.size)

    def without_gone(self, sealed: Sealed, stays: Mask) -> Sealed | None:
        """Write what stays of a segment as a new one; None if it cannot be read."""
        segment = self.read(sealed)
        return None if segment is None else self.write(kept(segment, stays))


def _header(file: Any, part: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array that `np.save` wrote; nothing is unpickled. Raises ValueError or OSError."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return shape, dtype
    except OSError:
        raise
    except Exception as error:  # numpy passes damaged headers to Python's parsers, which raise many kinds of errors
        raise ValueError(f"its {part} have an unreadable header") from error


def _checksum(array: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=16).hexdigest()


def _folder_mode(file_mode: int) -> int:
    return file_mode | (file_mode & 0o444) >> 2
