"""The interface between the speculation cache and a search for its nearest completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.records import Hit, Selection, Vector


class Similarity(Protocol):
    """Nearest neighbours within one partition. The store decides: a completion that it no longer has is no hit."""

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits of this tenant and tokenizer, nearest first; `vector` is `[dimension]`, of length 1."""

    def forget(self, selection: Selection) -> None:
        """Erase what the store is about to forget from everything that outlives this process."""

    def clear(self) -> None:
        """Drop what is in memory; the next search reads it again."""

    def erase_gone(self) -> None:
        """Erase what any process has forgotten or evicted, without waiting for a search. Raises CacheError."""

    def close(self) -> None:
        """Release resources; the store is still open."""


SimilarityOf = Callable[[CompletionStore], Similarity]
"""Creates the search for a store, like the function that `precedent.langchain.in_vector_store` returns."""
