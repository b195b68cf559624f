"""Remembers the vectors of recent requests: recall embeds a request, and storing its answer needs the same vector."""

from __future__ import annotations

from collections import OrderedDict

from precedent.cache.search.embedder import Embedder, embed_one
from precedent.cache.store.records import Vector
from precedent.runtime.process import Lock

REMEMBERED_QUERIES = 256


class QueryVectors:
    """Embeds requests, each once while it is among the last `REMEMBERED_QUERIES`."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._vectors: OrderedDict[str, Vector] = OrderedDict()
        self._lock = Lock()

    def of(self, query: str) -> Vector:
        """The unit vector of a request, float32 `[dimension]`. Raises CacheError if the embedder fails."""
        with self._lock:
            known = self._vectors.get(query)
        vector = embed_one(self._embedder, query) if known is None else known
        with self._lock:
            self._vectors[query] = vector
            self._vectors.move_to_end(query)
            while len(self._vectors) > REMEMBERED_QUERIES:
                self._vectors.popitem(last=False)
        return vector

    def clear(self) -> None:
        """Forget all requests."""
        with self._lock:
            self._vectors.clear()

    def __len__(self) -> int:
        return len(self._vectors)
