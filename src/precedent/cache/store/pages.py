"""Reads the pages of a cache file and its log without SQLite, so that undamaged pages of a damaged file are readable.

The formats are those of https://www.sqlite.org/fileformat2.html. A log consists of frames, one page each, with a
checksum that continues the previous frame's. SQLite reads up to the first frame with a wrong checksum, and of those
frames the complete transactions.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
"""Page size of a cache, unless an intact header says otherwise."""

MAGIC = b"SQLite format 3\x00"
LOG_HEADER, FRAME_HEADER = struct.Struct(">8I"), struct.Struct(">6I")
LOG_MAGIC = 0x377F0682
"""A log's first number without its lowest bit, which is set if checksums read big-endian words."""

HEADER_BYTES = 100
"""Size of the header at the start of the first page."""

FOLLOWED = 4
"""Number of rows that may refer to one overflow page: only one is right, the others are damaged."""

Sums = tuple[int, int]


class Frame(NamedTuple):
    """A frame: its page, the file's size in pages if it ends a transaction (else 0), and where the page begins."""

    page: int
    commit: int
    begin: int
    salts: tuple[int, int]
    sums: Sums
    computed: Sums

    @property
    def whole(self) -> bool:
        """Whether the page is intact."""
        return self.sums == self.computed and self.page > 0


@dataclass
class Log:
    """Where the newest versions of pages begin in a log.

    `current` are the versions that SQLite reads. `behind` are those after a damaged frame, which SQLite does not read.
    `commits_behind` counts the complete transactions there. The last of them may never have been acknowledged, since a
    power cut can tear it; with two, an acknowledged one cannot be read. `file_header` is the file's newest header,
    empty if the log has none.
    """

    page_bytes: int = PAGE_BYTES
    current: dict[int, int] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    commits_behind: int = 0
    file_header: bytes = b""

    @property
    def torn(self) -> bool:
        """Whether acknowledged transactions follow a damaged frame."""
        return self.commits_behind > 1


def log_in(file: BinaryIO) -> Log:
    """The current content of a log; empty if another process restarts it meanwhile, after folding it into the file."""
    header = _header_of(file)
    log = _log_in(file, header)
    if 1 in log.current:
        file.seek(log.current[1])
        log.file_header = file.read(HEADER_BYTES)
    return log if _header_of(file) == header else Log()


def _header_of(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(LOG_HEADER.size)


def _log_in(file: BinaryIO, header: bytes) -> Log:
    if len(header) < LOG_HEADER.size:
        return Log()
    magic, _, page_bytes, _, *_, first, second = LOG_HEADER.unpack(header)
    known, big = magic | 1 == LOG_MAGIC | 1, magic & 1 == 1
    order = ">u4" if (big if known else sys.byteorder == "big") else "<u4"
    log = Log(page_bytes if is_page_size(page_bytes) else PAGE_BYTES)
    whole = known and checksum((0, 0), header[:24], order) == (first, second)
    pending: dict[int, int] = {}
    for frame in _frames(file, log.page_bytes, (first, second), order):
        if whole and frame.salts != LOG_HEADER.unpack(header)[4:6]:
            break  # the rest is left over from an earlier log
        if not frame.whole:
            whole = False
            log.behind.update(pending)
        if not whole:
            log.behind[frame.page] = frame.begin
            log.commits_behind += frame.whole and frame.commit > 0
            continue
        pending[frame.page] = frame.begin
        if frame.commit:
            log.current.update(pending)
            pending.clear()
    return log


def _frames(file: BinaryIO, page_bytes: int, sums: Sums, order: str) -> Iterator[Frame]:
    """All complete frames of one log, without those of an earlier one; each is checked against its predecessor."""
    salts, size = None, FRAME_HEADER.size + page_bytes
    for _ in range((os.fstat(file.fileno()).st_size - LOG_HEADER.size) // size):  # bounded: it may grow while read
        data = file.read(size)
        if len(data) < size:
            return
        page, commit, *found, first, second = FRAME_HEADER.unpack_from(data)
        salts = salts or found
        if found != salts:
            return
        computed = checksum(sums, data[:8] + data[FRAME_HEADER.size :], order)
        sums = (first, second)
        yield Frame(page, commit, file.tell() - page_bytes, (found[0], found[1]), sums, computed)


def checksum(sums: Sums, data: bytes, order: str) -> Sums:
    """SQLite's checksum of a log, continued over `data`: for each pair of words a += x + b, then b += y + a.

    This is a linear recurrence with the matrix [[1, 1], [1, 2]], so the words are weighted by its powers.
    """
    words = np.frombuffer(data, order).astype(np.uint64)
    x, both = words[::2], words[::2] + words[1::2]
    weights = _powers(x.size)
    (a, b, d), (first, second) = (int(one) for one in weights[0]), sums
    rest = weights[1:]
    left = a * first + b * second + int((rest[:, 0] * x + rest[:, 1] * both).sum())
    right = b * first + d * second + int((rest[:, 1] * x + rest[:, 2] * both).sum())
    return left % 2**32, right % 2**32


@cache
def _powers(pairs: int) -> NDArray[np.uint64]:
    """The powers `pairs`, …, 1, 0 of [[1, 1], [1, 2]], each as its entries a, b, d modulo 2^32, `[pairs + 1, 3]`."""
    powers = [(1, 0, 1)]
    for _ in range(pairs):
        a, b, d = powers[-1]
        powers.append(((a + b) % 2**32, (b + d) % 2**32, (b + 2 * d) % 2**32))
    return np.array(powers[::-1], dtype=np.uint64)


class Pages:
    """The pages of a file, each in its newest version from the log if there is one.

    Reads through the open files passed in: closing another descriptor of the file would drop this process's locks.
    """

    def __init__(self, file: BinaryIO, log_file: BinaryIO | None) -> None:
        self._file, self._log_file = file, log_file
        self.log = Log() if log_file is None else log_in(log_file)
        self._versions, self._times_followed = dict(self.log.current), Counter[int]()
        self._page_bytes = self._size_of_pages()
        self.count = max([os.fstat(file.fileno()).st_size // self._page_bytes, *self._versions])

    def _size_of_pages(self) -> int:
        self._file.seek(0)
        header = self._file.read(18)
        said = int.from_bytes(header[16:18], "big")
        size = 2**16 if said == 1 else said
        return size if header.startswith(MAGIC) and is_page_size(size) else self.log.page_bytes

    def page(self, number: int) -> bytes | None:
        """A page, counted from 1; None for one that is missing or incomplete."""
        begin = self._versions.get(number)
        if begin is None:
            return _read(self._file, (number - 1) * self._page_bytes, self._page_bytes) if number > 0 else None
        assert self._log_file is not None
        return _read(self._log_file, begin, self._page_bytes)

    def followed(self, number: int) -> bytes | None:
        """An overflow page of a row; None once too many rows refer to it, so that reading always ends."""
        self._times_followed[number] += 1
        return self.page(number) if self._times_followed[number] <= FOLLOWED else None

    def behind_damage(self) -> list[int]:
        """The pages after a damaged frame in the log; from now on `page` returns these versions."""
        self._versions.update(self.log.behind)
        self._times_followed.clear()
        return sorted(self.log.behind)


def _read(file: BinaryIO, begin: int, size: int) -> bytes | None:
    file.seek(begin)
    data = file.read(size)
    return data if len(data) == size else None


def is_page_size(number: int) -> bool:
    """Whether SQLite allows pages of this many bytes."""
    return 512 <= number <= 2**16 and number & (number - 1) == 0
