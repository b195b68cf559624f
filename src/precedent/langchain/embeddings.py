"""`PrecedentEmbeddings`: LangChain embeddings from the speculation cache's embedding model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

from precedent.cache.embedder import resolve

if TYPE_CHECKING:
    from precedent.cache import Embedder

FROM_ENVIRONMENT = "PRECEDENT_EMBEDDER"
"""Environment variable with the default model."""


class PrecedentEmbeddings(Embeddings):
    """Unit vectors from your embedder, or from a sentence-transformers model (id or folder) loaded with the first text.

    The default is all-MiniLM-L6-v2, from its package if that is installed. A vector store and the speculation cache can
    share the model: `SpeculationCache.open(embedder=embeddings.embedder)`. Raises CacheError if it cannot be used.
    """

    def __init__(self, model: str | Embedder | None = None) -> None:
        self.embedder = resolve(model or os.environ.get(FROM_ENVIRONMENT))

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
