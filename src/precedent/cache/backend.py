"""The building blocks of a custom completion store; `CompletionStore` defines what it has to do.

A package offers its store under the entry points `precedent.stores`: the entry's name is a URL scheme, and its object
is called with a `StoreURL` and the settings of `precedent.cache.opening.open_store`.
`precedent.testing.store_contract.StoreContract` tests it.
"""

from precedent.cache.maintain.transfer import payload_of
from precedent.cache.search.embedder import Embedder, identity_of
from precedent.cache.search.same_embedder import maker_of, require_same
from precedent.cache.store.arrays import Ids
from precedent.cache.store.bounds import DEFAULT_MAX_BYTES, Bounds
from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.connection import folded
from precedent.cache.store.eviction import KEPT_SHARE, common_level
from precedent.cache.store.records import (
    ACTIONS,
    CacheStats,
    EmbedderIdentity,
    NewCompletion,
    Payload,
    Record,
    Selection,
    StoredCompletion,
    TenantStats,
    Vector,
    as_stored,
    storable,
)
from precedent.cache.store.report import Finding, VerifyReport
from precedent.cache.store.rows import completion_of, embedder_in, vector_of
from precedent.cache.store.store_url import StoreURL
from precedent.runtime.process import OfOneProcess

__all__ = [
    "ACTIONS",
    "DEFAULT_MAX_BYTES",
    "KEPT_SHARE",
    "Bounds",
    "CacheStats",
    "CompletionStore",
    "Embedder",
    "EmbedderIdentity",
    "Finding",
    "Ids",
    "NewCompletion",
    "OfOneProcess",
    "Payload",
    "Record",
    "Selection",
    "StoreURL",
    "StoredCompletion",
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
    "payload_of",
    "require_same",
    "storable",
    "vector_of",
]
