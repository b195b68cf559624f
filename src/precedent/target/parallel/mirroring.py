"""One process leads, the others do the same: every forward over a divided model is told before it is run.

The narrowest place to tell it is below the target model's four calls: what they do to a model is forwards over rows,
and what they do to a KV cache is keep, rewind and fork. A forward's message names its rows, and carries along what
was done to KV caches since the last one; nothing else is ever sent. Each process holds the keys and values of its own
heads under the same numbers.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from precedent.target.kv.arena import Moves
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Rows
from precedent.target.kv.shape import KVShape
from precedent.target.parallel.processes import Processes
from precedent.target.runner import Runner

FILL, LOGITS = "fill", "logits"
"""The two kinds of forwards: a piece of a prompt, and scored trees."""


class Journal:
    """What was done to KV caches and has not been told yet, in order. Caches may be forgotten on any thread."""

    def __init__(self) -> None:
        self._entries: deque[list[Any]] = deque()
        self._numbers = itertools.count()

    def note(self, *entry: Any) -> None:
        """Add an entry: what was done, to the cache of which number, and how."""
        self._entries.append(list(entry))

    def numbered(self, cache: MirroredKV) -> int:
        """A new cache's number; its end will be noted."""
        number = next(self._numbers)
        weakref.finalize(cache, self._entries.append, ["forget", number]).atexit = False
        return number

    def taken(self) -> list[list[Any]]:
        """All entries, which are no longer here then."""
        return [self._entries.popleft() for _ in range(len(self._entries))]


class MirroredKV(KVCache):
    """The leader's part of a KV cache, whose changes the followers make as well."""

    def __init__(self, shape: KVShape, journal: Journal) -> None:
        super().__init__(shape)
        self._journal, self.number = journal, journal.numbered(self)

    @classmethod
    def new(cls, shape: KVShape, journal: Journal) -> MirroredKV:
        """An empty cache in all processes."""
        cache = cls(shape, journal)
        journal.note("new", cache.number)
        return cache

    def fork(self, length: int, room: int = 0) -> KVCache:
        """As `KVCache.fork`, everywhere."""
        fork = super().fork(length, room)
        assert isinstance(fork, MirroredKV)
        self._journal.note("fork", fork.number, self.number, length, room)
        return fork

    def keep(self, rows: Sequence[int], moves: Moves | None = None) -> None:
        """As `KVCache.keep`, everywhere."""
        super().keep(rows, moves)
        self._journal.note("keep", self.number, [int(row) for row in rows])

    def rewind(self, length: int) -> None:
        """As `KVCache.rewind`, everywhere."""
        before = self.length
        super().rewind(length)
        if length != before:
            self._journal.note("rewind", self.number, length)

    def _unfilled(self) -> KVCache:
        return MirroredKV(self._shape, self._journal)


class LeadingRunner(Runner):
    """A runner that tells the followers of every forward. Raises GenerationError when they are not with it any more."""

    def __init__(self, runner: Runner, processes: Processes) -> None:
        super().__init__(runner.model, packed=runner.packed)
        self.journal, self._processes = Journal(), processes

    def logits(self, sequences: Sequence[Rows]) -> list[Tensor]:
        """As `Runner.logits`, by all processes."""
        self._reserve(sequences)
        with self._processes.together():
            self._tell(LOGITS, sequences)
            return super().logits(sequences)

    def fill(self, rows: Rows) -> None:
        """As `Runner.fill`, by all processes."""
        self._reserve([rows])
        with self._processes.together():
            self._tell(FILL, [rows])
            super().fill(rows)

    def _reserve(self, sequences: Sequence[Rows]) -> None:
        """Find out before anybody is told whether memory lasts: this the requests can still survive."""
        for rows in sequences:
            rows.kv.reserve(rows.kv.length + len(rows))

    def _tell(self, kind: str, sequences: Sequence[Rows]) -> None:
        self._processes.say({"kv": self.journal.taken(), kind: [_written(rows) for rows in sequences]})


class Follower:
    """Does what a leader tells, on this process's part of the model and of all KV caches."""

    def __init__(self, runner: Runner, shape: KVShape) -> None:
        self._runner, self._shape = runner, shape
        self._caches: dict[int, KVCache] = {}

    def do(self, message: dict[str, Any]) -> None:
        """Change the KV caches, then take part in the forward. Raises whatever it raises."""
        for entry in message["kv"]:
            self._change(*entry)
        if FILL in message:
            self._runner.fill(*self._read(message[FILL]))
        else:
            self._runner.logits(self._read(message[LOGITS]))

    def _change(self, what: str, number: int, *how: Any) -> None:
        match what:
            case "new":
                self._caches[number] = KVCache(self._shape)
            case "fork":
                source, length, room = how
                self._caches[number] = self._caches[source].fork(length, room)
            case "keep":
                self._caches[number].keep(*how)
            case "rewind":
                self._caches[number].rewind(*how)
            case "forget":
                self._caches.pop(number, None)  # a fork that failed for want of memory was never told of

    def _read(self, written: Sequence[dict[str, Any]]) -> list[Rows]:
        return [_rows(self._caches[each["kv"]], each) for each in written]


def _written(rows: Rows) -> dict[str, Any]:
    """Rows as values that JSON can hold; ancestors are bits."""
    assert isinstance(rows.kv, MirroredKV)
    return {
        "kv": rows.kv.number,
        "length": rows.kv.length,
        "capacity": rows.kv.capacity,
        "tokens": [int(token) for token in rows.token_ids],
        "depths": rows.depths.tolist(),
        "ancestors": None if rows.ancestors is None else np.packbits(rows.ancestors).tobytes().hex(),
    }


def _rows(kv: KVCache, written: dict[str, Any]) -> Rows:
    """The same rows over this process's own keys and values. Raises ValueError when these are not as long."""
    if kv.length != written["length"]:
        raise ValueError(f"a KV cache holds {kv.length} tokens here and {written['length']} in the first process")
    kv.reserve(written["capacity"])
    tokens, bits = written["tokens"], written["ancestors"]
    ancestors = None if bits is None else _square(bits, len(tokens))
    return Rows(kv, tokens, np.array(written["depths"], dtype=np.int64), ancestors)


def _square(bits: str, count: int) -> NDArray[np.bool_]:
    unpacked = np.unpackbits(np.frombuffer(bytes.fromhex(bits), dtype=np.uint8), count=count * count)
    return unpacked.reshape(count, count).astype(np.bool_)
