"""The pool of completions that a replayed turn may see, with their similarity to its query."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from precedent.cache import Completion, Embedder, Hit
from precedent.drafters.matching.token_index import TokenIndex

Vectors = Mapping[str, NDArray[np.float32]]

EMBEDDED_AT_ONCE = 512


def embedded(queries: Iterable[str], embedder: Embedder, progress: Callable[[str, int], None]) -> Vectors:
    """The vector of each query; every text is embedded once."""
    vectors: dict[str, NDArray[np.float32]] = {}
    names = list(dict.fromkeys(queries))
    for begin in range(0, len(names), EMBEDDED_AT_ONCE):
        batch = names[begin : begin + EMBEDDED_AT_ONCE]
        vectors.update(zip(batch, embedder.embed(batch), strict=True))
        progress("embedding", len(vectors))
    return vectors


class Pool:
    """A speculation cache in memory whose completions can be hidden and shown again.

    `vectors` maps a query to its unit vector; if it is None, recall finds nothing. `index` holds the tokens of all
    visible completions, for baselines.
    """

    def __init__(self, vectors: Vectors | None = None) -> None:
        self.vectors, self.index = vectors, TokenIndex()
        self._completions: list[Completion] = []
        self._matrix = np.empty((0, 0), dtype=np.float32)
        self._next_id, self._epoch = 1, 0
        self._asked: tuple[str, int, int, int] | None = None  # all contenders make the same query before a turn
        self._found: list[Hit] = []
        self._texts: Counter[int] = Counter()
        self._credit: dict[int, tuple[int, int]] = {}

    def holds(self, token_ids: tuple[int, ...]) -> bool:
        """Whether a visible completion has exactly these tokens."""
        return self._texts[hash(token_ids)] > 0

    def add(self, completion: Completion) -> int:
        """Make a completion visible; returns its new id."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._completions.append(replace(completion, id=number))
        self._texts[hash(completion.token_ids)] += 1
        if self.vectors is not None:
            self._add_vector(self.vectors[completion.query])
        self.index.append(number, completion.token_ids)
        return number

    def _add_vector(self, vector: NDArray[np.float32]) -> None:
        place = len(self._completions) - 1
        if place >= len(self._matrix):
            grown = np.zeros((max(1024, 2 * len(self._matrix)), vector.size), dtype=np.float32)
            grown[:place] = self._matrix[:place] if place else 0.0
            self._matrix = grown
        self._matrix[place] = vector

    def hide(self, ids: Iterable[int]) -> list[Completion]:
        """Hide completions and return them; add one again to show it again."""
        gone = set(ids)
        if not gone:
            return []
        hidden = [completion for completion in self._completions if completion.id in gone]
        kept = [place for place, completion in enumerate(self._completions) if completion.id not in gone]
        self._texts.subtract(hash(completion.token_ids) for completion in hidden)
        if self.vectors is not None:
            self._matrix[: len(kept)] = self._matrix[kept]
        self._completions = [self._completions[place] for place in kept]
        self.index.forget(gone)
        self._epoch += 1
        return hidden

    # The methods of a cache that recall calls

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        """The visible completions with the most similar queries."""
        if self.vectors is None or not self._completions:
            return []
        asked = (query, k, self._epoch, self._next_id)
        if asked != self._asked:
            similarities = self._matrix[: len(self._completions)] @ self.vectors[query]
            best = np.argsort(-similarities, kind="stable")[:k].tolist()
            found = [Hit(self._completions[place].id, float(similarities[place])) for place in best]
            self._asked, self._found = asked, found
        return self._found

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[Completion]:
        """The visible completions with an id above `after_id`."""
        return self._completions[bisect_left(self._completions, after_id + 1, key=lambda one: one.id) :]

    def epoch(self) -> int:
        """A number that grows whenever something is hidden."""
        return self._epoch

    def ids(self, tenant: str, tokenizer: str) -> NDArray[np.int64]:
        """The ids of the visible completions."""
        return np.array([completion.id for completion in self._completions], dtype=np.int64)

    def among(self, ids: Iterable[int], *, tenant: str) -> list[Completion]:
        """The visible completions with these ids, including their credit."""
        found: list[Completion] = []
        for number in ids:
            for completion in self.since(tenant, "", number - 1)[:1]:
                if completion.id == number:
                    accepted, rejected = self._credit.get(number, (0, 0))
                    found.append(replace(completion, accepted=accepted, rejected=rejected))
        return found

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add accepted and rejected tokens to the completions' credit."""
        for number, (right, wrong) in counts.items():
            before = self._credit.get(number, (0, 0))
            self._credit[number] = before[0] + right, before[1] + wrong
