"""The speculation cache: completion store, similarity index and embedder; knows no language model.

Importing it loads none of FAISS, sentence-transformers and torch; they are imported when first needed.
"""

from precedent.cache.bounds import DEFAULT_MAX_BYTES, Bounds
from precedent.cache.completion_store import CompletionStore
from precedent.cache.embedder import Embedder, SentenceTransformerEmbedder
from precedent.cache.fingerprint import (
    model_fingerprint,
    prompt_fingerprint,
    tokenizer_fingerprint,
    tools_fingerprint,
)
from precedent.cache.records import (
    CacheStats,
    EmbedderIdentity,
    Hit,
    NewCompletion,
    Selection,
    StoredCompletion,
    TenantStats,
)
from precedent.cache.redaction import Redact, never_store
from precedent.cache.speculation_cache import SpeculationCache
from precedent.cache.store import SQLiteStore
from precedent.cache.store_url import StoreURL
from precedent.cache.verifying import Finding, VerifyReport, verify_cache

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
