"""What every test of the store contract stands on: an open store, and completions to put into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from precedent.cache import Completion, CompletionStore, EmbedderIdentity

DIMENSION = 4
EMBEDDER = EmbedderIdentity("test", "fingerprint-of-test", DIMENSION)

OpenStore = Callable[[], CompletionStore]


def completion(*token_ids: int, **fields: Any) -> Completion:
    """A completion of tokenizer "tok" and model "model" with a distinct query."""
    defaults: dict[str, Any] = {
        "tokenizer": "tok",
        "model": "model",
        "query": f"query {token_ids}",
        "text": f"text {token_ids}",
    }
    return Completion(token_ids, **{**defaults, **fields})


def unit_vector(seed: int) -> np.typing.NDArray[np.float32]:
    """A random unit vector, `[DIMENSION]`."""
    vector = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def ids_of(found: list[Completion]) -> list[int]:
    """The ids of completions, in order."""
    return [one.id for one in found]


class WithStore:
    """Fixtures; `persistent` says whether data outlive the store object."""

    persistent = True

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Override with a function that opens the same data on every call."""
        raise AssertionError("a store contract needs an `open_store` fixture")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[CompletionStore]:
        """An open, empty store."""
        store = open_store()
        yield store
        store.close()

    def add(self, store: CompletionStore, new: Completion, seed: int = 0) -> int:
        """Insert a completion with a random vector."""
        return store.insert(new, unit_vector(seed), EMBEDDER)
