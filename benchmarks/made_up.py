"""Completions made up in the likeness of agents' answers, for the benchmarks of stores and of the drafting service."""

from __future__ import annotations

import numpy as np

from precedent.cache import Bounds, Completion, EmbedderIdentity
from precedent.cache.records import Vector

DIMENSION, TENANT, TOKENIZER = 384, "bench", "tokenizer"
EMBEDDER = EmbedderIdentity("bench", "bench", DIMENSION)
TOPICS, PASSAGES, LENGTH, VOCABULARY = 300, 2000, 200, 49_152
BOUNDS, INDEX_BYTES, AT_ONCE = Bounds(max_bytes=2**40), 2**33, 1000


class Traces:
    """Requests around a few hundred topics; answers of passages that others share, and of words of their own.

    The same number gives the same completion.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._topics = random.normal(size=(TOPICS, 1, DIMENSION)).astype(np.float32)
        self._variants = 0.7 * random.normal(size=(TOPICS, 40, DIMENSION)).astype(np.float32)
        lengths = random.integers(5, 60, PASSAGES)
        self._passages = [(random.zipf(1.3, length) % VOCABULARY).astype(np.int32) for length in lengths]

    def vectors(self, begin: int, count: int) -> Vector:
        random = np.random.default_rng(begin + 1)
        topics = random.integers(TOPICS, size=count)
        variants = self._variants[topics, random.zipf(1.5, count) % 40]
        found = self._topics[topics, 0] + variants + 0.5 * random.normal(size=(count, DIMENSION)).astype(np.float32)
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)

    def tokens(self, number: int) -> tuple[int, ...]:
        random, parts = np.random.default_rng(number), list[np.ndarray]()
        while sum(map(len, parts)) < LENGTH:
            parts += [self._passages[int(random.zipf(1.4)) % PASSAGES], random.integers(0, VOCABULARY, 6)]
        return tuple(np.concatenate(parts)[:LENGTH].tolist())

    def completion(self, number: int) -> Completion:
        return Completion(self.tokens(number), TOKENIZER, "model", TENANT, f"{number} " + "q" * 300, text="t" * 700)
