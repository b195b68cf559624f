"""The tokens of a tenant's completions as sealed segments on disk, which drafting reads instead of the rows.

Nothing in a segment is trusted or needed, because the rows in SQLite are the source of truth: sorting 20 million tokens
at start would take a quarter of a minute. An array that is missing, torn, in another format or different from its
manifest is left out, and a completion counts only if its row still exists unchanged. Files are copied into memory when
they are read, so a file that shrinks or changes later can neither crash nor mislead a process.

`forget` erases a completion from the table first and from the segments next. A process that seals reads the table only
after it has the lock, so no segment can bring back what `forget` has just erased.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from precedent.cache.database import Database
from precedent.cache.files import (
    NEW_FILE,
    erase_file,
    is_own_folder,
    new_file,
    open_own,
    read_own,
    touch_own,
    wait_for_folder,
)
from precedent.cache.records import Completions, Ids, Mask
from precedent.cache.rows import Directory, directory_of, lengths_of, read_completions, tenant_bytes
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

COMPLETION = np.dtype([("id", "<i8"), ("checksum", "<u8"), ("begin", "<i4")])
"""A completion in a segment: its id, its row's checksum, and where its tokens begin."""

TOKEN = np.dtype("<i4")
PARTS = {"completions": COMPLETION, "tokens": TOKEN, "order": TOKEN}
"""The arrays of a segment by name, each in a file `NAME.PART.npy`."""

MAPPED_FROM = 128 * 2**20
"""Arrays from this size on are mapped; paging smaller ones never pays off."""

GROWTH = 2
"""A new segment absorbs segments that are at most this many times larger, so that a few segments hold everything."""

MAX_SEGMENTS = 12
"""Above this number, segments are merged whatever their sizes; parts not in memory are then read from rows again."""

READ_AGAIN = 3
"""Number of times to read segments again while another process replaces them; after that, their rows are read."""

LOCK_SECONDS = 20.0
"""Seconds that `forget` waits for a process that seals."""

FORMAT = 1
MANIFEST = "manifest.json"

_LOCK, _WRITING = "lock", "writing"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(rf"{re.escape(MANIFEST)}|[0-9a-f]{{16}}\.\w+\.npy|{NEW_FILE.pattern}")
"""The names that are given to folders and files here; nothing else is touched."""

_PIECE = 1 << 16
"""Positions summed at a time: few enough to stay in the processor's cache."""

_WRAP = 1 << 64

Int32s = NDArray[np.int32]


class Segment(NamedTuple):
    """Completions one after another, and the positions in their tokens in a sorted order.

    `tokens` holds a negative mark before each completion's tokens; `order` holds every position except the last of each
    completion. The code that searches a segment defines the sort order.
    """

    completions: NDArray[np.void]
    tokens: Int32s
    order: Int32s

    @property
    def ids(self) -> Ids:
        """The completions' ids, `[n]`."""
        return np.asarray(self.completions["id"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per completion, its mark included, `[n]`."""
        return np.diff(self.completions["begin"], append=self.tokens.size)

    @property
    def owners(self) -> Int32s:
        """The number of its completion for each token."""
        return np.repeat(np.arange(self.completions.size, dtype=np.int32), self.lengths)

    def kept(self, stays: Mask) -> Segment:
        """The segment reduced to the completions for which `stays` is true; the order stays sorted."""
        owners = self.owners
        completions = self.completions[stays].copy()
        shift = np.cumsum(np.where(stays, 0, self.lengths)).astype(np.int32)
        completions["begin"] -= shift[stays]
        order = self.order[stays[owners[self.order]]]
        return Segment(completions, self.tokens[stays[owners]], order - shift[owners[order]])

    @property
    def is_sound(self) -> bool:
        """True if following the arrays stays within them: compiled code does not check indices."""
        begins, size, order = self.completions["begin"], self.tokens.size, self.order
        if not begins.size:
            return size == 0 and order.size == 0
        if begins[0] != 0 or (self.lengths <= 0).any() or order.size != size - begins.size:
            return False
        if not (self.tokens[begins] < 0).all() or np.count_nonzero(self.tokens < 0) != begins.size:
            return False
        if order.size and not 0 <= order.min() <= order.max() < size:
            return False
        last = np.append(begins[1:], size) - 1
        of_all, of_ends = (size * (size - 1) // 2, (size - 1) * size * (2 * size - 1) // 6), _power_sums(last)
        return _power_sums(order) == tuple((whole - part) % _WRAP for whole, part in zip(of_all, of_ends, strict=True))


def _power_sums(positions: NDArray[np.integer[Any]]) -> tuple[int, int]:
    """The sums of some numbers and of their squares, modulo 2^64; an accidental difference changes at least one.

    Works piece by piece, so it takes no longer than reading the memory.
    """
    total = squares = 0
    for begin in range(0, positions.size, _PIECE):
        piece = positions[begin : begin + _PIECE].astype(np.uint64)
        total += int(piece.sum())
        squares += int((piece * piece).sum())
    return total % _WRAP, squares % _WRAP


class Partition:
    """One tenant's completions under one tokenizer: what drafting reads at start, and seals once it has grown."""

    def __init__(self, database: Database, folder: IndexFolder, tenant: str, tokenizer: str) -> None:
        self._database, self._folder = database, folder
        self._tenant, self._tokenizer = tenant, tokenizer
        self._damaged: set[str] = set()

    @property
    def scratch(self) -> Scratch:
        """The place for the large arrays of this partition's index."""
        return Scratch(self._folder.path)

    def directory(self) -> Directory:
        """An overview of the partition's rows. Raises CacheError if the file cannot be read."""
        return directory_of(self._database, self._tenant, self._tokenizer)

    def lengths(self) -> tuple[Ids, Ids]:
        """The ids of all rows and the number of tokens of each. Raises CacheError."""
        return lengths_of(self._database, self._tenant, self._tokenizer)

    def most_tokens(self) -> int:
        """An upper bound for the partition's tokens; takes microseconds. Raises CacheError."""
        return tenant_bytes(self._database, self._tenant) // TOKEN.itemsize

    def completions(self, ids: Ids) -> Completions:
        """These completions as they are in the table. Raises CacheError if the file cannot be read."""
        return read_completions(self._database, self._tenant, self._tokenizer, ids)

    def segments(self, alive: Directory) -> list[Segment]:
        """The segments reduced to rows that still exist, each completion once, oldest segment first."""
        found: list[Segment] = []
        seen = np.empty(0, dtype=np.int64)
        for segment in self._whole_segments(self._files()):
            stays = alive.holds(segment.completions) & ~np.isin(segment.ids, seen)
            found.append(segment if stays.all() else segment.kept(stays))
            seen = np.concatenate([seen, found[-1].ids])
        return [segment for segment in found if segment.completions.size]

    def _whole_segments(self, files: SegmentFiles) -> list[Segment]:
        """All readable segments; reads again if another process has just replaced some of them."""
        listed = files.listed()
        for _ in range(READ_AGAIN):
            read = {sealed.name: files.read(sealed) for sealed in listed}
            before, listed = listed, files.listed()
            if listed == before:
                break
        self._damaged |= {name for name, segment in read.items() if segment is None}
        return [segment for segment in read.values() if segment is not None]

    def seal(self, in_memory: Mapping[int, int], extract: Callable[[Ids], Segment], least: int = 1) -> bool:
        """Write what no segment holds yet, if it is at least `least` tokens; returns whether anything was written.

        `in_memory` maps each completion in memory to its number of tokens; `extract` returns the segment of some ids,
        without checksums. Small segments are merged into the new one. Does nothing while another thread or process is
        writing. Raises CacheError or OSError.
        """
        if self._database.read_only:
            return False
        with self._folder.alone() as alone:
            return alone and self._seal(self._files(), in_memory, extract, least)

    def _seal(
        self, files: SegmentFiles, in_memory: Mapping[int, int], extract: Callable[[Ids], Segment], least: int
    ) -> bool:
        alive = self.directory()
        sealed = files.without_gone(alive, self._damaged)
        held = [files.completions(one)["id"] for one in sealed]
        wanted = np.intersect1d(np.fromiter(in_memory, dtype=np.int64), alive.ids, assume_unique=True)
        new = np.setdiff1d(wanted, np.concatenate([*held, np.empty(0, dtype=np.int64)]))
        size = sum(in_memory[key] for key in new.tolist())
        if not new.size or size < least:
            return False
        merged = _to_merge(sealed, held, wanted, size)
        ids = np.concatenate([new, *(np.intersect1d(held[place], wanted) for place in merged)])
        segment = extract(np.unique(ids))
        segment.completions["checksum"] = alive.checksums_of(segment.ids)
        stay = [one for place, one in enumerate(sealed) if place not in merged]
        files.publish([*stay, files.write(segment)])
        files.erase_unlisted()
        return True

    def _files(self) -> SegmentFiles:
        return self._folder.files(self._tenant, self._tokenizer)


def _to_merge(sealed: Sequence[Sealed], held: Sequence[Ids], in_memory: Ids, size: int) -> set[int]:
    """Choose the segments to merge with `size` new tokens: from the smallest on, while they are not much larger.

    A segment with completions that are not in this process's memory stays, unless there are too many segments.
    """
    merged: set[int] = set()
    for place in sorted(range(len(sealed)), key=lambda place: sealed[place].tokens):
        crowded = len(sealed) - len(merged) >= MAX_SEGMENTS
        if sealed[place].tokens > GROWTH * size and not crowded:
            break
        if crowded or np.isin(held[place], in_memory).all():
            merged.add(place)
            size += sealed[place].tokens
    return merged


class IndexFolder:
    """The folder beside a cache's file that holds the segments of all its partitions."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self.path = database.with_name(database.name + "-index")

    def files(self, tenant: str, tokenizer: str) -> SegmentFiles:
        """The segments of one partition; the folder's name reveals nothing about the tenant."""
        named = repr((tenant, tokenizer)).encode("utf-8", "surrogatepass")
        return SegmentFiles(self.path / hashlib.blake2b(named, digest_size=16).hexdigest(), self._mode())

    def _all_files(self) -> list[SegmentFiles]:
        """The segments of every partition. Raises CacheError if a folder is a link."""
        if not is_own_folder(self.path):
            return []
        folders = sorted(path for path in self.path.iterdir() if _FOLDER.fullmatch(path.name) and is_own_folder(path))
        return [SegmentFiles(folder, self._mode()) for folder in folders]

    @contextlib.contextmanager
    def alone(self, seconds: float = 0.0) -> Iterator[bool]:
        """Yields True to the one thread or process that may write now, and False to all others.

        First erases what an interrupted writer left: a marker file exists from the start of a write to its end.
        """
        mark = self.path / _WRITING
        if not is_own_folder(self.path):
            self.path.mkdir(mode=_folder_mode(self._mode()) | 0o100, exist_ok=True)
        touch_own(self.path / _LOCK, self._mode())  # a lock through a link would empty the file that it names
        lock = FileLock(self.path / _LOCK, mode=self._mode())
        try:
            lock.acquire(timeout=seconds)
        except Timeout:
            yield False
            return
        try:
            if mark.exists():
                for files in self._all_files():
                    files.erase_half_made()
            with contextlib.suppress(OSError):  # no room for the marker: the partition's next seal erases leftovers
                touch_own(mark, self._mode())
            yield True
            mark.unlink(missing_ok=True)
        finally:
            lock.release()

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
                for files in self._all_files():
                    files.erase_gone(alive)
        except OSError as error:
            raise CacheError(self._not_erased(str(error))) from error

    def sweep(self) -> None:
        """Erase what a process left that was killed while sealing; does nothing while another one is writing.

        Raises CacheError if the folder is a link.
        """
        if not is_own_folder(self.path) or not (self.path / _WRITING).exists():
            return
        try:
            with self.alone():
                pass
        except OSError as error:  # a full disk or a folder of another user: the next writer tries again
            logger.info("unfinished files in %s stay there: %s", self.path, error)

    def size(self) -> int:
        """Bytes of all files in the folder."""
        return sum(file.lstat().st_size for files in self._all_files() for file in files.folder.iterdir())

    def _not_erased(self, reason: str) -> str:
        return (
            f"the records are forgotten, but {self.path} still holds their tokens ({reason}); run forget again "
            "later, or delete that folder while no process uses the cache"
        )

    def _mode(self) -> int:
        """File mode of the segments: readable by exactly those who can read the cache."""
        return self._database.stat().st_mode & 0o666


@dataclass(frozen=True, slots=True)
class Sealed:
    """A segment as the manifest lists it: its numbers of completions and tokens, and a checksum per file."""

    name: str
    completions: int
    tokens: int
    checksums: dict[str, str]


class SegmentFiles:
    """The segments of one partition in one folder; the manifest lists the valid ones.

    Reading needs no lock; writing needs the lock of the whole index (`IndexFolder.alone`).
    """

    def __init__(self, folder: Path, file_mode: int = 0o600) -> None:
        self.folder, self._mode = folder, file_mode

    def listed(self) -> list[Sealed]:
        """The segments in the manifest, oldest first; none if there is no readable manifest."""
        return self._listed() or []

    def _listed(self) -> list[Sealed] | None:
        """The segments in the manifest; None if it is damaged."""
        try:
            manifest = json.loads(read_own(self.folder / MANIFEST))
            return [_sealed(entry) for entry in manifest["segments"]] if manifest["format"] == FORMAT else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.info("the index in %s is rebuilt: %s", self.folder, error)
            return None

    def read(self, sealed: Sealed) -> Segment | None:
        """The segment in memory; None unless it is exactly what was sealed."""
        try:
            with ThreadPoolExecutor(len(PARTS)) as readers:  # reading and checksums release the GIL
                segment = Segment(*readers.map(partial(self._array, sealed), PARTS))
            sizes = (segment.completions.size, segment.tokens.size)
            if sizes != (sealed.completions, sealed.tokens) or not segment.is_sound:
                raise ValueError("it differs from its manifest")
            return segment
        except (OSError, ValueError) as error:
            logger.info("segment %s in %s is rebuilt: %s", sealed.name, self.folder, error)
            return None

    def completions(self, sealed: Sealed) -> NDArray[np.void]:
        """The completions in a segment; none if they cannot be read."""
        try:
            return self._array(sealed, "completions")
        except (OSError, ValueError):
            return np.empty(0, COMPLETION)

    def _array(self, sealed: Sealed, part: str) -> NDArray[Any]:
        """One array, read rather than mapped: if another process truncated a mapped file, this one would crash."""
        with os.fdopen(open_own(self._file(sealed.name, part)), "rb") as file:
            shape, dtype = _header(file, part)
            if dtype != PARTS[part] or len(shape) != 1:
                raise ValueError(f"its {part} have the wrong type")
            if shape[0] * dtype.itemsize != os.fstat(file.fileno()).st_size - file.tell():
                raise ValueError(f"its {part} do not match the size in their header")
            array = np.fromfile(file, dtype, shape[0])
        if _checksum(array) != sealed.checksums[part]:
            raise ValueError(f"its {part} have another checksum")
        return array

    def write(self, segment: Segment) -> Sealed:
        """Write a segment's files and wait for the disk; it is valid once `publish` lists it."""
        self._make_folder()
        name, arrays = secrets.token_hex(8), segment._asdict()
        for part, array in arrays.items():
            with new_file(self._file(name, part), self._mode) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array, dtype=PARTS[part]), allow_pickle=False)
        checksums = {part: _checksum(array) for part, array in arrays.items()}
        return Sealed(name, segment.completions.size, segment.tokens.size, checksums)

    def publish(self, segments: Iterable[Sealed]) -> None:
        """Make exactly these segments valid, durably even after a power cut."""
        entries = [asdict(sealed) for sealed in segments]
        self._make_folder()
        with new_file(self.folder / MANIFEST, self._mode) as file:
            file.write(json.dumps({"format": FORMAT, "segments": entries}, indent=1).encode())
        wait_for_folder(self.folder)

    def _make_folder(self) -> None:
        if not is_own_folder(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=_folder_mode(self._mode))

    def without_gone(self, alive: Directory, damaged: Container[str] = ()) -> list[Sealed]:
        """Drop completions whose rows are gone, and segments named in `damaged`; returns the segments that are left.

        Call it with the lock held. Raises OSError.
        """
        listed = self.listed()
        whole = [one for one in listed if one.name not in damaged]
        left = [sealed for one in whole if (sealed := self._without_gone(one, alive)) is not None]
        if left != listed:
            self.publish(left)
        self.erase_unlisted()
        return left

    def _without_gone(self, sealed: Sealed, alive: Directory) -> Sealed | None:
        stays = alive.holds(self.completions(sealed))
        if stays.all() and stays.size:
            return sealed
        segment = self.read(sealed) if stays.any() else None
        return None if segment is None else self.write(segment.kept(stays))

    def erase_gone(self, alive: Directory) -> None:
        """Erase what is gone; without room for a smaller segment, everything: it is sealed again from the table."""
        try:
            self.without_gone(alive)
        except OSError as error:
            logger.info("the index in %s is erased whole, because it cannot be rewritten: %s", self.folder, error)
            self._erase_but(set())

    def erase_half_made(self) -> None:
        """Erase what an interrupted writer left, if the manifest is sound. Raises OSError."""
        if self._listed() is not None:
            self.erase_unlisted()

    def erase_unlisted(self) -> None:
        """Overwrite and delete every file that the manifest does not list; without segments, delete the folder too.

        Raises OSError if a file can be neither overwritten nor deleted.
        """
        segments = self.listed()
        wanted = {self._file(sealed.name, part).name for sealed in segments for part in PARTS}
        self._erase_but(wanted | {MANIFEST} if segments else set())

    def _erase_but(self, wanted: set[str]) -> None:
        if not is_own_folder(self.folder):
            return
        for file in sorted(self.folder.iterdir()):
            if file.name not in wanted and _FILE.fullmatch(file.name):
                erase_file(file)
        if not wanted:
            with contextlib.suppress(OSError):  # something that is not Precedent's is in it
                self.folder.rmdir()

    def _file(self, name: str, part: str) -> Path:
        return self.folder / f"{name}.{part}.npy"


def _sealed(entry: dict[str, Any]) -> Sealed:
    sealed = Sealed(str(entry["name"]), int(entry["completions"]), int(entry["tokens"]), dict(entry["checksums"]))
    if not sealed.name.isalnum() or set(sealed.checksums) != set(PARTS):
        raise ValueError("a segment's entry in the manifest is damaged")
    return sealed


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


class Scratch:
    """Allocates arrays of `mapped_from` bytes or more in unnamed files, so that the system can page them out and in.

    Such a file has no name: no other process can truncate it while it is mapped, and it disappears with the process.
    Arrays are in memory without a `folder` or without room on its disk.
    """

    def __init__(self, folder: Path | None = None, *, mapped_from: int = MAPPED_FROM) -> None:
        self._folder, self._mapped_from = folder, mapped_from

    def empty(self, size: int, dtype: type[np.generic]) -> NDArray[Any]:
        """An uninitialised array of `size` elements."""
        num_bytes = size * np.dtype(dtype).itemsize
        if self._folder is None or num_bytes < self._mapped_from:
            return np.empty(size, dtype)
        try:
            with tempfile.TemporaryFile(prefix=".scratch-", dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # later, a page without room would kill the process
                return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)
        except (OSError, AttributeError):  # no such folder, a full disk, a system without posix_fallocate
            return np.empty(size, dtype)

    def placed(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself, or a mapped copy of it if it is large."""
        if self._folder is None or array.nbytes < self._mapped_from:
            return array
        copy = self.empty(array.size, array.dtype.type)
        copy[:] = array
        return copy

    def resized(self, array: NDArray[Any], size: int, filler: int) -> NDArray[Any]:
        """The array with room for `size` elements, the new ones filled with `filler`."""
        grown = self.empty(size, array.dtype.type)
        grown[: array.size] = array
        grown[array.size :] = filler
        return grown
