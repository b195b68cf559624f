"""The speculation cache: completion store, similarity index and embedder; it needs no language model.

Importing it loads none of FAISS, sentence-transformers and torch; they are imported at first use.
"""

from precedent.cache.embedder import Embedder, SentenceTransformerEmbedder
from precedent.cache.fingerprint import model_fingerprint, prompt_fingerprint, tokenizer_fingerprint, tools_fingerprint
from precedent.cache.inspection import verify_cache
from precedent.cache.records import (
    DEFAULT_MAX_BYTES,
    Bounds,
    CacheStats,
    Completion,
    Damage,
    EmbedderIdentity,
    Hit,
    Selection,
    TenantStats,
    VerifyReport,
)
from precedent.cache.redaction import Redact, never_store
from precedent.cache.speculation_cache import SpeculationCache
from precedent.cache.sqlite_store import SQLiteStore
from precedent.cache.store import CompletionStore
from precedent.cache.store_url import StoreURL

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Bounds",
    "CacheStats",
    "Completion",
    "CompletionStore",
    "Damage",
    "Embedder",
    "EmbedderIdentity",
    "Hit",
    "Redact",
    "SQLiteStore",
    "Selection",
    "SentenceTransformerEmbedder",
    "SpeculationCache",
    "StoreURL",
    "TenantStats",
    "VerifyReport",
    "model_fingerprint",
    "never_store",
    "prompt_fingerprint",
    "tokenizer_fingerprint",
    "tools_fingerprint",
    "verify_cache",
]
