"""The seam between the speculation cache and whatever finds the nearest of its completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.records import Hit, Selection, Vector


class Similarity(Protocol):
    """Nearest neighbours within one partition. The store is the truth: what is found here and gone there is no hit."""

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits of this tenant and tokenizer, the nearest first; `vector` is `[dimension]`, of length 1."""

    def forget(self, selection: Selection) -> None:
        """Erase what the store is about to forget from everything that outlives this process."""

    def clear(self) -> None:
        """Drop what is in memory; the next search reads it again."""

    def close(self) -> None:
        """Release what it holds; the store is still open."""


SimilarityOf = Callable[[CompletionStore], Similarity]
"""Makes the search for a store, as what `precedent.langchain.in_vector_store` returns does."""
