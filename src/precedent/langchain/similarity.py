"""Embeddings of LangChain for a speculation cache and of the cache for LangChain, and vector stores as its search.

The vector store only suggests completions. The cache's own records decide whether they belong to the tenant, still
exist, and how similar they are. A store that filters badly therefore costs hits but leaks nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from precedent.cache import Completion, CompletionStore, Embedder, Hit, Selection
from precedent.cache.embedder import resolve
from precedent.cache.index import SimilarityOf
from precedent.cache.records import Vector, digest
from precedent.errors import CacheError, ConfigError, PrecedentError
from precedent.runtime.process import Lock

AT_ONCE = 256
"""Texts added to the vector store in one batch."""

_METADATA = {"tenant": "tenant", "tokenizer": "tokenizer", "completion_id": "id"}
"""Keys of a document's metadata, and the fields of a completion that they hold."""

EMBEDDER_VARIABLE = "PRECEDENT_EMBEDDER"
"""Environment variable with the default model."""

TenantFilter = Callable[[str, str], Any]
"""Maps tenant and tokenizer to the store's `filter=` argument, which selects documents with both in their metadata."""


class PrecedentEmbeddings(Embeddings):
    """Unit vectors from your embedder, or from a sentence-transformers model (id or folder) loaded with the first text.

    The default is all-MiniLM-L6-v2, from its package if that is installed. A vector store and the speculation cache can
    share the model: `SpeculationCache.open(embedder=embeddings.embedder)`. Raises CacheError if it cannot be used.
    """

    def __init__(self, model: str | Embedder | None = None) -> None:
        self.embedder = resolve(model or os.environ.get(EMBEDDER_VARIABLE))

    @property
    def name(self) -> str:
        """The model's id or folder, or the name of your embedder."""
        return str(getattr(self.embedder, "name", type(self.embedder).__name__))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text."""
        vectors: list[list[float]] = self.embedder.embed(texts).tolist() if texts else []
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.embed_documents([text])[0]


class LangChainEmbedder:
    """LangChain `Embeddings` as the cache's embedder.

    `fingerprint` must change whenever the vectors change. By default it combines the class, the model's name and the
    dimension. Raises ConfigError if the embeddings name no model and no fingerprint is given.
    """

    def __init__(self, embeddings: Embeddings, *, fingerprint: str | None = None) -> None:
        model = getattr(embeddings, "model", None) or getattr(embeddings, "model_name", None)
        if fingerprint is None and not isinstance(model, str):
            raise ConfigError(
                f"{type(embeddings).__name__} does not name its model: give fingerprint=, a text that changes "
                "whenever its vectors change"
            )
        self.name = model if isinstance(model, str) else type(embeddings).__name__
        self._embeddings, self._given = embeddings, fingerprint
        self._dimension: int | None = None

    @property
    def fingerprint(self) -> str:
        """Equal for embedders with comparable vectors."""
        return self._given or f"{type(self._embeddings).__name__}:{self.name}:{self.dimension}"

    @property
    def dimension(self) -> int:
        """Length of a vector; the first access embeds a word to measure it."""
        if self._dimension is None:
            self._dimension = len(self._embeddings.embed_query("dimension"))
        return self._dimension

    def embed(self, texts: Sequence[str]) -> Vector:
        """Vectors, float32 `[len(texts), dimension]`."""
        return np.array(self._embeddings.embed_documents(list(texts)), dtype=np.float32)


def in_vector_store(vector_store: VectorStore, *, tenant_filter: TenantFilter | None = None) -> SimilarityOf:
    """`SpeculationCache.open(path, embedder=LangChainEmbedder(e), similarity=in_vector_store(vector_store))`.

    `vector_store` must embed with the same `Embeddings`. `tenant_filter` builds its filter for tenant and tokenizer;
    the default is a mapping of metadata, or a function for `InMemoryVectorStore`. The store must filter before it picks
    the nearest documents: one that filters afterwards finds fewer, or none.
    """
    return lambda store: VectorStoreSimilarity(store, vector_store, tenant_filter or _filter_of(vector_store))


def _filter_of(vector_store: VectorStore) -> TenantFilter:
    if isinstance(vector_store, InMemoryVectorStore):
        return lambda tenant, tokenizer: lambda document: _is_of(document, tenant, tokenizer)
    return lambda tenant, tokenizer: {"tenant": tenant, "tokenizer": tokenizer}


def _is_of(document: Document, tenant: str, tokenizer: str) -> bool:
    return (document.metadata.get("tenant"), document.metadata.get("tokenizer")) == (tenant, tokenizer)


@dataclass(slots=True)
class _Followed:
    epoch: int
    stamp: object = None
    last_id: int = 0
    keys: dict[int, str] = field(default_factory=dict)


class VectorStoreSimilarity:
    """Keeps a vector store in step with a completion store: adds new completions and deletes removed ones."""

    def __init__(self, store: CompletionStore, vector_store: VectorStore, tenant_filter: TenantFilter) -> None:
        self._store, self._vectors, self._filter = store, vector_store, tenant_filter
        self._followed: dict[tuple[str, str], _Followed] = {}
        self._lock = Lock()

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits, nearest first, newer first among equals. Raises CacheError if the store fails."""
        if k < 1:
            return []
        with self._lock, self._reported():
            self._catch_up(tenant, tokenizer)
            asked = self._filter(tenant, tokenizer)
            found = self._vectors.similarity_search_by_vector(vector.tolist(), k=k, filter=asked)
            if not all(_is_of(document, tenant, tokenizer) for document in found):
                raise CacheError("the vector store ignored the filter: give in_vector_store a tenant_filter")
            keys = {int(document.metadata["completion_id"]): document.id for document in found}
            records = self._store.records(Selection(tenant=tenant, ids=tuple(keys)), 0, len(keys)) if keys else []
            self._delete([keys[stale] for stale in keys.keys() - {record.id for record in records}])
        own = [one for one in records if one.vector is not None and one.tokenizer == tokenizer]
        hits = [Hit(one.id, float(one.vector @ vector)) for one in own if one.vector is not None]
        return sorted(hits, key=lambda hit: (-hit.similarity, -hit.completion_id))

    def forget(self, selection: Selection) -> None:
        """Delete the completions that the store is about to forget. Raises CacheError if the vector store fails."""
        with self._lock, self._reported():
            self._delete([_key(completion) for completion in self._store.list(selection, None)])

    def clear(self) -> None:
        """Forget what was added, which is all the state here; the next search starts over."""
        with self._lock:
            self._followed.clear()

    def erase_gone(self) -> None:
        """Delete what other processes have forgotten since the last search. Raises CacheError."""
        with self._lock, self._reported():
            for partition in list(self._followed):
                self._catch_up(*partition)

    def close(self) -> None:
        """Do nothing: the caller owns the vector store."""

    def _catch_up(self, tenant: str, tokenizer: str) -> None:
        followed = self._followed.setdefault((tenant, tokenizer), _Followed(epoch=self._store.epoch()))
        stamp = self._store.stamp()
        if stamp == followed.stamp:
            return
        epoch = self._store.epoch()
        if epoch != followed.epoch:
            gone = followed.keys.keys() - set(self._store.ids(tenant, tokenizer).tolist())
            self._delete([followed.keys.pop(row_id) for row_id in sorted(gone)])
            followed.epoch = epoch
        fresh = self._store.since(tenant, tokenizer, followed.last_id)
        for begin in range(0, len(fresh), AT_ONCE):
            self._add([one for one in fresh[begin : begin + AT_ONCE] if one.query.strip()], followed)
        followed.last_id = max([followed.last_id, *(one.id for one in fresh)])
        followed.stamp = stamp

    def _add(self, completions: Sequence[Completion], followed: _Followed) -> None:
        keys = {_key(one): one for one in completions}
        try:
            held = {document.id for document in self._vectors.get_by_ids(list(keys))} if keys else set()
        except NotImplementedError:  # unknown; adding the same keys again changes nothing
            held = set()
        if new := sorted(keys.keys() - held):
            told = [{key: getattr(keys[one], name) for key, name in _METADATA.items()} for one in new]
            self._vectors.add_texts([keys[one].query for one in new], metadatas=told, ids=new)
        followed.keys.update({one.id: key for key, one in keys.items()})

    def _delete(self, keys: Sequence[str | None]) -> None:
        if known := [key for key in keys if key is not None]:
            self._vectors.delete(known)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except PrecedentError:
            raise
        except Exception as error:  # whatever the store's own client raises
            name = type(self._vectors).__name__
            raise CacheError(f"the vector store {name} failed: {error!r}") from error


def _key(completion: Completion) -> str:
    parts = (completion.tenant, completion.tokenizer, str(completion.id), completion.query)
    return f"precedent-{digest(*parts, size=16).hex()}"
