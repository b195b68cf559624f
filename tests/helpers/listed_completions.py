"""A speculation cache as a list, a recall drafter on it, and what candidates say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from precedent.cache import Completion, Hit, prompt_fingerprint
from precedent.cache.records import Ids
from precedent.config import SamplingParams
from precedent.drafters.base import Candidates
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.request import Request
from precedent.runtime.background import AtOnce
from precedent.tree import ROOT

TOKENIZER = "tokenizer-a"
END = 2


class ListedCompletions:
    """A speculation cache as a list; `near` maps a query to similarities by completion id."""

    def __init__(self) -> None:
        self.stored: list[Completion] = []
        self.near: dict[str, dict[int, float]] = {}
        self.credited: list[dict[int, tuple[int, int]]] = []
        self.num_forgotten = 0

    def epoch(self) -> int:
        """Counts what was forgotten."""
        return self.num_forgotten

    def ids(self, tenant: str, tokenizer: str) -> Ids:
        """The ids of the tenant's completions."""
        return np.array([completion.id for completion in self.since(tenant, tokenizer)], dtype=np.int64)

    def forget(self, completion_id: int) -> None:
        """Erase a completion."""
        self.stored = [completion for completion in self.stored if completion.id != completion_id]
        self.num_forgotten += 1

    def add(self, tokens: list[int], *, tenant: str = "default", prompt: tuple[int, ...] | None = None) -> int:
        """Store a completion and return its id."""
        fingerprint = "" if prompt is None else prompt_fingerprint(prompt)
        number = len(self.stored) + self.num_forgotten + 1
        self.stored.append(
            Completion(tuple(tokens), TOKENIZER, "model", tenant, prompt_fingerprint=fingerprint, id=number)
        )
        return number

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        """Similarities as they were set."""
        own = {c.id for c in self.since(tenant, tokenizer)}
        return [Hit(key, near) for key, near in self.near.get(query, {}).items() if key in own][:k]

    def among(self, ids: Iterable[int], *, tenant: str) -> list[Completion]:
        """The tenant's completions of these ids."""
        return [c for c in self.stored if c.id in set(ids) and c.tenant == tenant]

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[Completion]:
        """The tenant's completions behind an id."""
        return [c for c in self.stored if c.id > after_id and (c.tenant, c.tokenizer) == (tenant, tokenizer)]

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Keep what was credited."""
        self.credited.append(dict(counts))


def request(prompt: tuple[int, ...] = (1, 2, 3), *, query: str = "q", tenant: str = "default") -> Request:
    """A greedy request."""
    return Request("r", prompt, SamplingParams(), tenant, query, end_token_ids=frozenset({END}))


def recall_from(cache: ListedCompletions) -> RecallDrafter:
    """A recall drafter whose searches are done at once."""
    return RecallDrafter(cache, TOKENIZER, AtOnce())


def first_path(candidates: Candidates) -> list[int]:
    """Tokens of the path that was judged likeliest at every node."""
    path, above = [], ROOT
    while True:
        below = [node for node, parent in enumerate(candidates.parents) if parent == above]
        if not below:
            return path
        above = max(below, key=lambda node: candidates.estimates[node])
        path.append(candidates.token_ids[above])


def paths_in_order(candidates: Candidates) -> list[tuple[int, ...]]:
    """The path of every node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(candidates.token_ids, candidates.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return found


def paths(candidates: Candidates) -> set[tuple[int, ...]]:
    """All paths from the root."""
    return set(paths_in_order(candidates))
