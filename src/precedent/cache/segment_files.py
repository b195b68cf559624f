"""Segments on disk: three `.npy` files each, written whole or not at all, and a manifest that says which ones count.

Nothing here is trusted or needed: the rows in SQLite are the truth, and a segment that is missing, torn, of another
format or not what the manifest says is left out. Files are copied into memory when they are read, so that one that
shrinks or changes later can neither crash a process nor mislead it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.cache.segment import COMPLETION, TOKEN, Segment, is_sound

logger = logging.getLogger("precedent.cache")

FORMAT = 1
MANIFEST = "manifest.json"
PARTS = {"completions": COMPLETION, "tokens": TOKEN, "order": TOKEN}
"""The arrays of a segment, each in the file `NAME.PART.npy`."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A segment as the manifest lists it: completions, tokens with their marks, and a checksum per file."""

    name: str
    completions: int
    tokens: int
    checksums: dict[str, str]


class SegmentFiles:
    """The segments of one partition, in a folder of their own.

    Reading needs no lock; whoever writes holds the lock of the whole index (`precedent.cache.sealing`).
    """

    def __init__(self, folder: Path, file_mode: int = 0o600) -> None:
        self.folder, self._mode = folder, file_mode

    def listed(self) -> list[Sealed]:
        """What the manifest lists, the oldest first; nothing when there is none that can be read."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            if manifest["format"] != FORMAT:
                return []
            return [_sealed(entry) for entry in manifest["segments"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.info("the index in %s is built anew: %s", self.folder, error)
            return []

    def read(self, sealed: Sealed) -> Segment | None:
        """The segment in memory, None unless it is exactly what was sealed."""
        try:
            segment = Segment(*(self._array(sealed, part, kind) for part, kind in PARTS.items()))
            sizes = (segment.completions.size, segment.tokens.size)
            if sizes != (sealed.completions, sealed.tokens) or not is_sound(segment):
                raise ValueError("it is not what the manifest says")
            return segment
        except (OSError, ValueError) as error:
            logger.info("segment %s in %s is built anew: %s", sealed.name, self.folder, error)
            return None

    def completions(self, sealed: Sealed) -> NDArray[np.void]:
        """Which completions a segment holds (`COMPLETION` records), none when that cannot be read."""
        try:
            return self._array(sealed, "completions", COMPLETION)
        except (OSError, ValueError):
            return np.empty(0, COMPLETION)

    def _array(self, sealed: Sealed, part: str, kind: np.dtype[Any]) -> NDArray[Any]:
        mapped = np.lib.format.open_memmap(self._file(sealed.name, part), mode="r")  # never unpickles
        if mapped.dtype != kind or mapped.ndim != 1:
            raise ValueError(f"its {part} are of another kind")
        array = np.array(mapped)
        if _checksum(array) != sealed.checksums[part]:
            raise ValueError(f"its {part} have another checksum")
        return array

    def write(self, segment: Segment) -> Sealed:
        """Write a segment's files and wait for the disk; it does not count before `publish` lists it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=_folder_mode(self._mode))
        name, arrays = secrets.token_hex(8), dict(zip(PARTS, segment, strict=True))
        for part, array in arrays.items():
            with self._new_file(self._file(name, part)) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array, dtype=PARTS[part]), allow_pickle=False)
        checksums = {part: _checksum(array) for part, array in arrays.items()}
        return Sealed(name, segment.completions.size, segment.tokens.size, checksums)

    def publish(self, segments: Iterable[Sealed]) -> None:
        """From now on exactly these count, also after a power cut."""
        entries = [asdict(sealed) for sealed in segments]
        self.folder.mkdir(parents=True, exist_ok=True, mode=_folder_mode(self._mode))
        with self._new_file(self.folder / MANIFEST) as file:
            file.write(json.dumps({"format": FORMAT, "segments": entries}, indent=1).encode())
        _wait_for_folder(self.folder)

    def erase_unlisted(self) -> None:
        """Overwrite and delete every file that the manifest does not list; without segments the folder goes as well.

        Raises OSError when a file can be neither overwritten nor deleted.
        """
        if not self.folder.is_dir():
            return
        segments = self.listed()
        wanted = {self._file(sealed.name, part).name for sealed in segments for part in PARTS}
        wanted |= {MANIFEST} if segments else set()
        for file in sorted(self.folder.iterdir()):
            if file.name not in wanted:
                _erase(file)
        if not segments:
            self.folder.rmdir()

    def _file(self, name: str, part: str) -> Path:
        return self.folder / f"{name}.{part}.npy"

    @contextlib.contextmanager
    def _new_file(self, target: Path) -> Iterator[Any]:
        """A file that appears under its name when it is complete and on disk."""
        handle, name = tempfile.mkstemp(prefix=".", suffix=".new", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(self._mode)
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)


def _sealed(entry: dict[str, Any]) -> Sealed:
    sealed = Sealed(str(entry["name"]), int(entry["completions"]), int(entry["tokens"]), dict(entry["checksums"]))
    if not sealed.name.isalnum() or set(sealed.checksums) != set(PARTS):
        raise ValueError("a segment's entry in the manifest is damaged")
    return sealed


def _checksum(array: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=16).hexdigest()


def _folder_mode(file_mode: int) -> int:
    return file_mode | (file_mode & 0o444) >> 2


def _erase(file: Path) -> None:
    """Overwrite, then delete: a reader that still has the file open finds nothing in it either."""
    with contextlib.suppress(PermissionError), file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
        opened.flush()
        os.fsync(opened.fileno())
    file.unlink(missing_ok=True)


def _wait_for_folder(folder: Path) -> None:
    """Wait until names of files are on disk, where the system can wait for that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
