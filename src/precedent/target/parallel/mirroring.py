"""Mirrors the leading process's work on a divided model: it announces every forward, and the others repeat it.

Messages are sent below the target model's four calls, where there is least to send: to a model those calls are
forwards over rows, and to a KV cache they are keep, rewind and fork. A forward's message holds its rows and all changes
to KV caches since the last forward; nothing else is ever sent. Each process stores the keys and values of its own heads
under the same numbers.
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
    """Changes to KV caches that have not been sent yet, in order. Any thread may drop a cache."""

    def __init__(self) -> None:
        self._entries: deque[list[Any]] = deque()
        self._numbers = itertools.count()

    def note(self, *entry: Any) -> None:
        """Add an entry: the change, the number of the cache, and the change's arguments."""
        self._entries.append(list(entry))

    def numbered(self, cache: MirroredKV) -> int:
        """A new cache's number; its end will be recorded too."""
        number = next(self._numbers)
        weakref.finalize(cache, self._entries.append, ["forget", number]).atexit = False
        return number

    def taken(self) -> list[list[Any]]:
        """Remove and return all entries."""
        return [self._entries.popleft() for _ in range(len(self._entries))]


class MirroredKV(KVCache):
    """The leader's part of a KV cache; the followers repeat its changes."""

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
        """As `KVCache.fork`, in all processes."""
        fork = super().fork(length, room)
        assert isinstance(fork, MirroredKV)
        self._journal.note("fork", fork.number, self.number, length, room)
        return fork

    def keep(self, rows: Sequence[int], moves: Moves | None = None) -> None:
        """As `KVCache.keep`, in all processes."""
        super().keep(rows, moves)
        self._journal.note("keep", self.number, [int(row) for row in rows])

    def rewind(self, length: int) -> None:
        """As `KVCache.rewind`, in all processes."""
        before = self.length
        super().rewind(length)
        if length != before:
            self._journal.note("rewind", self.number, length)

    def _unfilled(self) -> KVCache:
        return MirroredKV(self._shape, self._journal)


class LeadingRunner(Runner):
    """A runner that announces every forward to the followers. Raises GenerationError after one of them is lost."""

    def __init__(self, runner: Runner, processes: Processes) -> None:
        super().__init__(runner.model, packed=runner.packed)
        self.journal, self._processes = Journal(), processes

    def logits(self, sequences: Sequence[Rows]) -> list[Tensor]:
        """As `Runner.logits`, computed by all processes."""
        self._reserve(sequences)
        with self._processes.together():
            self._tell(LOGITS, sequences)
            return super().logits(sequences)

    def fill(self, rows: Rows) -> None:
        """As `Runner.fill`, computed by all processes."""
        self._reserve([rows])
        with self._processes.together():
            self._tell(FILL, [rows])
            super().fill(rows)

    def _reserve(self, sequences: Sequence[Rows]) -> None:
        """Reserve memory before anything is sent: requests survive a failure here."""
        for rows in sequences:
            rows.kv.reserve(rows.kv.length + len(rows))

    def _tell(self, kind: str, sequences: Sequence[Rows]) -> None:
        self._processes.say({"kv": self.journal.taken(), kind: [_written(rows) for rows in sequences]})


class Follower:
    """Does what the leader announces, on this process's part of the model and of all KV caches."""

    def __init__(self, runner: Runner, shape: KVShape) -> None:
        self._runner, self._shape = runner, shape
        self._caches: dict[int, KVCache] = {}

    def do(self, message: dict[str, Any]) -> None:
        """Change the KV caches, then take part in the forward. Raises whatever the forward raises."""
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
                self._caches.pop(number, None)  # a fork that ran out of memory was never announced

    def _read(self, written: Sequence[dict[str, Any]]) -> list[Rows]:
        return [_rows(self._caches[each["kv"]], each) for each in written]


def _written(rows: Rows) -> dict[str, Any]:
    """Rows as values that JSON can hold; ancestors are packed bits."""
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
    """The same rows over this process's own keys and values. Raises ValueError if their length differs."""
    if kv.length != written["length"]:
        raise ValueError(f"a KV cache holds {kv.length} tokens here and {written['length']} in the first process")
    kv.reserve(written["capacity"])
    tokens, bits = written["tokens"], written["ancestors"]
    ancestors = None if bits is None else _square(bits, len(tokens))
    return Rows(kv, tokens, np.array(written["depths"], dtype=np.int64), ancestors)


def _square(bits: str, count: int) -> NDArray[np.bool_]:
    unpacked = np.unpackbits(np.frombuffer(bytes.fromhex(bits), dtype=np.uint8), count=count * count)
    return unpacked.reshape(count, count).astype(np.bool_)
