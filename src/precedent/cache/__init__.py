"""The speculation cache: completion store, similarity index and embedder; it needs no language model.

Importing it loads none of FAISS, sentence-transformers and torch; they are imported at first use.
"""

from precedent.cache.maintain.verifying import verify_cache
from precedent.cache.search.embedder import Embedder, SentenceTransformerEmbedder
from precedent.cache.speculation_cache import SpeculationCache
from precedent.cache.sqlite_store import SQLiteStore
from precedent.cache.store.bounds import DEFAULT_MAX_BYTES, Bounds
from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.fingerprint import (
    model_fingerprint,
    prompt_fingerprint,
    tokenizer_fingerprint,
    tools_fingerprint,
)
from precedent.cache.store.records import (
    CacheStats,
    EmbedderIdentity,
    Hit,
    NewCompletion,
    Selection,
    StoredCompletion,
    TenantStats,
)
from precedent.cache.store.redaction import Redact, never_store
from precedent.cache.store.report import Finding, VerifyReport
from precedent.cache.store.store_url import StoreURL

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Bounds",
    "CacheStats",
    "CompletionStore",
    "Embedder",
    "EmbedderIdentity",
    "Finding",
    "Hit",
    "NewCompletion",
    "Redact",
    "SQLiteStore",
    "Selection",
    "SentenceTransformerEmbedder",
    "SpeculationCache",
    "StoreURL",
    "StoredCompletion",
    "TenantStats",
    "VerifyReport",
    "model_fingerprint",
    "never_store",
    "prompt_fingerprint",
    "tokenizer_fingerprint",
    "tools_fingerprint",
    "verify_cache",
]
