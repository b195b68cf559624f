"""`PrecedentEmbeddings`, LangChain embeddings by the model that the speculation cache embeds with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

from precedent.cache.search.embedder import resolve

if TYPE_CHECKING:
    from precedent.cache.search.embedder import Embedder

FROM_ENVIRONMENT = "PRECEDENT_EMBEDDER"
"""Environment variable that names the model where none is given."""


class PrecedentEmbeddings(Embeddings):
    """Unit vectors by a sentence-transformers model (id or folder), loaded at the first text, or by an object of yours.

    The default is all-MiniLM-L6-v2, the packaged one where it is installed. One model serves a vector store and the
    speculation cache: `SpeculationCache.open(embedder=embeddings.embedder)`. Raises CacheError where it cannot be.
    """

    def __init__(self, model: str | Embedder | None = None) -> None:
        self.embedder = resolve(model or os.environ.get(FROM_ENVIRONMENT))

    @property
    def name(self) -> str:
        """The model's id or folder, or what an object of yours calls itself."""
        return str(getattr(self.embedder, "name", type(self.embedder).__name__))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text."""
        vectors: list[list[float]] = self.embedder.embed(texts).tolist() if texts else []
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.embed_documents([text])[0]
