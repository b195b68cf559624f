"""An embedder without a model: deterministic and fast, and it gives similar texts similar vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


class HashEmbedder:
    """Hashes words and character trigrams into signed bags, normalised to length 1, float32 `[n, dimension]`.

    Embedders with equal `dimension` and `salt` give equal vectors on every machine.
    """

    def __init__(self, dimension: int = 64, salt: str = "") -> None:
        self.name = "hash"
        self.dimension = dimension
        self.fingerprint = f"hash-{dimension}-{salt}"
        self._key = salt.encode()[:64]

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, float32 `[len(texts), dimension]`."""
        return np.stack([self._embed(text) for text in texts])

    def _embed(self, text: str) -> NDArray[np.float32]:
        vector = np.zeros(self.dimension, dtype=np.float32)
        for feature in _features(text):
            value = hashlib.blake2b(feature.encode("utf-8", "replace"), digest_size=8, key=self._key).digest()
            number = int.from_bytes(value, "little")
            vector[number % self.dimension] += 1.0 if number >> 63 else -1.0
        if not vector.any():
            vector[0] = 1.0  # there was nothing to hash, or everything cancelled out
        return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def _features(text: str) -> Iterator[str]:
    padded = f" {' '.join(text.casefold().split())} "
    yield from padded.split()
    yield from (padded[at : at + 3] for at in range(len(padded) - 2))
