"""The building blocks of a custom completion store; `CompletionStore` defines what it has to do.

A package offers its store under the entry points `precedent.stores`: the entry's name is a URL scheme, and its object
is called with a `StoreURL` and the settings of `precedent.cache.store.open_store`.
`precedent_testing.store_contract.StoreContract` tests it.
"""

from precedent.cache.database import folded
from precedent.cache.embedder import Embedder, identity_of, maker_of, require_same
from precedent.cache.eviction import KEPT_SHARE, common_level
from precedent.cache.records import (
    ACTIONS,
    DEFAULT_MAX_BYTES,
    TEXTS,
    Bounds,
    CacheStats,
    Completion,
    Completions,
    Damage,
    EmbedderIdentity,
    Ids,
    Selection,
    TenantStats,
    Vector,
    VerifyReport,
    as_stored,
    storable,
)
from precedent.cache.rows import completion_of, embedder_in, vector_of, with_vector
from precedent.cache.store import CompletionStore
from precedent.cache.store_url import StoreURL
from precedent.runtime.process import OfOneProcess

__all__ = [
    "ACTIONS",
    "DEFAULT_MAX_BYTES",
    "KEPT_SHARE",
    "TEXTS",
    "Bounds",
    "CacheStats",
    "Completion",
    "CompletionStore",
    "Completions",
    "Damage",
    "Embedder",
    "EmbedderIdentity",
    "Ids",
    "OfOneProcess",
    "Selection",
    "StoreURL",
    "TenantStats",
    "Vector",
    "VerifyReport",
    "as_stored",
    "common_level",
    "completion_of",
    "embedder_in",
    "folded",
    "identity_of",
    "maker_of",
    "require_same",
    "storable",
    "vector_of",
    "with_vector",
]
