"""The pool of completions that a replayed turn may see, with their similarity to its query."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from precedent.cache import Completion, Embedder, Hit, prompt_fingerprint
from precedent.drafters.matching.token_index import TokenIndex
from precedent_replay.turns import Turn

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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a pool keeps of a turn: its answer, its recall query, and the fingerprint of its prompt."""

    trajectory: int
    group: str
    token_ids: tuple[int, ...]
    query: str
    fingerprint: str
    tools: str = ""

    @classmethod
    def of(cls, turn: Turn) -> Answer:
        """Keep a turn's answer without its prompt: the prompts of a whole log would not fit in memory."""
        prompt = prompt_fingerprint(turn.prompt_ids)
        return cls(turn.trajectory, turn.group, turn.token_ids, turn.query, prompt, turn.tools_fingerprint)


POOLS = ("online", "same-task", "other-tasks", "none")


class Pool:
    """A speculation cache in memory whose completions can be hidden and shown again.

    `vectors` maps a query to its unit vector; if it is None, recall finds nothing. `index` holds the tokens of all
    visible completions, for baselines.
    """

    def __init__(self, vectors: Vectors | None) -> None:
        self.vectors = vectors
        self._completions: list[Completion] = []
        self._matrix = np.empty((0, 0), dtype=np.float32)
        self._next_id = 1
        self._epoch = 0
        self._asked: tuple[str, int, int, int] | None = None  # all contenders make the same query before a turn
        self._found: list[Hit] = []
        self._texts: Counter[int] = Counter()
        self._credit: dict[int, tuple[int, int]] = {}
        self.index = TokenIndex()

    def holds(self, token_ids: tuple[int, ...]) -> bool:
        """Whether a visible completion has exactly these tokens."""
        return self._texts[hash(token_ids)] > 0

    def __len__(self) -> int:
        return len(self._completions)

    def add(self, answer: Answer) -> int:
        """Make an answer visible; returns its id."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._completions.append(
            Completion(answer.token_ids, "", "", prompt_fingerprint=answer.fingerprint, tools=answer.tools, id=number)
        )
        self._texts[hash(answer.token_ids)] += 1
        self._add_vector(answer.query)
        self.index.append(number, answer.token_ids)
        return number

    def hide(self, ids: Sequence[int]) -> None:
        """Hide completions; add one again to show it again."""
        gone = set(ids)
        self._texts.subtract(hash(each.token_ids) for each in self._completions if each.id in gone)
        kept = [place for place, completion in enumerate(self._completions) if completion.id not in gone]
        if self.vectors is not None:
            self._matrix[: len(kept)] = self._matrix[kept]
        self._completions = [self._completions[place] for place in kept]
        self.index.forget(gone)
        self._epoch += 1

    def _add_vector(self, query: str) -> None:
        if self.vectors is None:
            return
        vector, place = self.vectors[query], len(self._completions) - 1
        if place >= len(self._matrix):
            grown = np.zeros((max(1024, 2 * len(self._matrix)), vector.size), dtype=np.float32)
            grown[: len(self._matrix)] = self._matrix if self._matrix.size else 0.0
            self._matrix = grown
        self._matrix[place] = vector

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        """The visible completions with the most similar queries."""
        if self.vectors is None or not self._completions:
            return []
        asked = (query, k, self._epoch, self._next_id)
        if asked != self._asked:
            self._asked, self._found = asked, self._nearest(self.vectors[query], k)
        return self._found

    def _nearest(self, vector: NDArray[np.float32], k: int) -> list[Hit]:
        similarities = self._matrix[: len(self._completions)] @ vector
        best = np.argsort(-similarities, kind="stable")[:k]
        return [Hit(self._completions[place].id, float(similarities[place])) for place in best.tolist()]

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[Completion]:
        """The visible completions with an id above `after_id`."""
        low = len(self._completions)
        while low and self._completions[low - 1].id > after_id:
            low -= 1
        return self._completions[low:]

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
            place = bisect_left(self._completions, number, key=lambda completion: completion.id)
            accepted, rejected = self._credit.get(number, (0, 0))
            for completion in self._completions[place : place + 1]:
                if completion.id == number:
                    found.append(replace(completion, accepted=accepted, rejected=rejected))
        return found

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add accepted and rejected tokens to the completions' credit."""
        for number, (right, wrong) in counts.items():
            before = self._credit.get(number, (0, 0))
            self._credit[number] = before[0] + right, before[1] + wrong
