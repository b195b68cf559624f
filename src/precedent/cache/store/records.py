"""The cache's records, plain and frozen, and the checks that keep invalid ones out."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.errors import CacheError

MAX_TENANT_LENGTH = 200
MAX_TOKEN_ID = 2**31 - 1

MAX_COUNT = 2**63 - 1
"""The largest counter that a store can hold."""

ACTIONS = "actions:1"
"""In place of a tokenizer's fingerprint: the partition of what agents did (`precedent.actions.decisions`)."""

EARLIEST, LATEST = -60e9, 250e9
"""Range of a record's time in seconds since the epoch: about the years 70 to 9890, which a calendar can show."""

Vector = NDArray[np.float32]
"""A unit vector, `[dimension]`, or several, `[n, dimension]`."""


@dataclass(frozen=True, slots=True)
class NewCompletion:
    """What write-back stores: one finished answer with the keys under which it may be proposed again.

    `token_ids` are the ids as generated, the end token included. `tenant` and `tokenizer` (a fingerprint) are hard
    keys; `model`, `tools` and `workflow_step` are soft ones. `query` is the text that is embedded, `prompt_fingerprint`
    marks an exact repeat of the prompt, and `text` is for people who list or search the cache.
    """

    token_ids: tuple[int, ...]
    tokenizer: str
    model: str
    tenant: str = "default"
    query: str = ""
    prompt_fingerprint: str = ""
    tools: str = ""
    workflow_step: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class StoredCompletion(NewCompletion):
    """A completion in the cache, with its record.

    `created` is in seconds since the epoch; `count` is how often it was written back; `hits` is the number of requests
    in which at least one of its tokens was accepted; `accepted` and `rejected` count tokens.
    """

    id: int = 0
    created: float = 0.0
    count: int = 1
    hits: int = 0
    accepted: int = 0
    rejected: int = 0


Completions = list[StoredCompletion]


@dataclass(frozen=True, slots=True)
class Record:
    """A completion with its counters and its vector, `[dimension]`, or None without one."""

    completion: StoredCompletion
    vector: Vector | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored completion whose request resembles the query; `similarity` is the cosine, higher is nearer."""

    completion_id: int
    similarity: float


@dataclass(frozen=True, slots=True)
class EmbedderIdentity:
    """The embedder that made a cache's vectors; `name` is for people, `fingerprint` decides."""

    name: str
    fingerprint: str
    dimension: int

    def __str__(self) -> str:
        return f"{self.name!r} ({self.fingerprint}, {self.dimension} dimensions)"


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's share: records, tokens, payload bytes and the sums of the records' counters."""

    tenant: str
    records: int
    tokens: int
    bytes: int
    hits: int
    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A summary of a cache. `path` is None in memory; `bytes` is the payload that `max_bytes` bounds."""

    path: str | None
    read_only: bool
    records: int
    tokens: int
    bytes: int
    max_bytes: int
    file_bytes: int
    embedder: EmbedderIdentity | None
    tenants: tuple[TenantStats, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which completions to list or forget: all given conditions must hold.

    `before` is a time in seconds since the epoch; `containing` is searched for in text and query, ignoring case.
    """

    tenant: str | None = None
    before: float | None = None
    containing: str | None = None
    ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.tenant is not None:
            check_tenant(self.tenant)
        if self.containing == "":
            raise CacheError("containing is empty, which every record matches; give the text to look for")
        if self.containing is not None:
            object.__setattr__(self, "containing", as_stored(self.containing))
        if self.before is not None and self.before != self.before:
            raise CacheError("before is not a number; give a time in seconds since the epoch")

    @property
    def everything(self) -> bool:
        """True when no condition is given."""
        return self == Selection()


@dataclass(frozen=True)
class Payload:
    """A completion as bytes, ready for a store: the same bytes give the same `identity` and `checksum`."""

    completion: NewCompletion
    vector: Vector | None

    @cached_property
    def token_blob(self) -> bytes:
        """Token ids as little-endian int32."""
        return np.asarray(self.completion.token_ids, dtype="<i4").tobytes()

    @cached_property
    def vector_blob(self) -> bytes | None:
        """The vector as little-endian float32, or None if there was no text to embed."""
        return None if self.vector is None else self.vector.astype("<f4").tobytes()

    @cached_property
    def identity(self) -> bytes:
        """Equal for two completions of a partition that are the same answer to the same query, 16 bytes."""
        return digest(self.token_blob, self.completion.query, size=16)

    @cached_property
    def checksum(self) -> bytes:
        """Checksum of everything that never changes except the vector, 8 bytes."""
        return record_checksum(self.completion, self.token_blob)

    @cached_property
    def vector_checksum(self) -> bytes | None:
        """Checksum of the vector, 8 bytes."""
        return None if self.vector_blob is None else vector_checksum(self.vector_blob)

    @property
    def size(self) -> int:
        """Payload bytes: tokens, vector and the two texts."""
        texts = len(self.completion.query.encode()) + len(self.completion.text.encode())
        return len(self.token_blob) + len(self.vector_blob or b"") + texts


def digest(*parts: str | bytes, size: int) -> bytes:
    """A hash of `size` bytes over the parts; includes their lengths, so different lists of parts never coincide."""
    data = [part.encode() if isinstance(part, str) else part for part in parts]
    lengths = struct.pack(f"<{len(data)}q", *map(len, data))
    return hashlib.blake2b(lengths + b"".join(data), digest_size=size).digest()


def record_checksum(completion: NewCompletion, token_blob: bytes) -> bytes:
    """The checksum stored beside a record and compared when it is read, 8 bytes."""
    keys = (completion.tenant, completion.tokenizer, completion.model, completion.prompt_fingerprint)
    texts = (completion.tools, completion.workflow_step, completion.query, completion.text)
    return digest(*keys, *texts, token_blob, size=8)


def vector_checksum(vector_blob: bytes) -> bytes:
    """The checksum stored beside a vector, 8 bytes."""
    return digest(vector_blob, size=8)


def check_tenant(tenant: str) -> None:
    """Raise CacheError unless `tenant` is a name of 1 to 200 printable characters."""
    if not tenant:
        raise CacheError("the tenant's name is empty; give 1 to 200 printable characters")
    if len(tenant) > MAX_TENANT_LENGTH:
        raise CacheError(f"the tenant's name has {len(tenant)} characters; give at most {MAX_TENANT_LENGTH}")
    if not tenant.isprintable():
        raise CacheError(f"the tenant's name {tenant!r} holds a character that is not printable; leave it out")


def as_stored(text: str) -> str:
    """A text with lone surrogates replaced, since they have no UTF-8 form."""
    return text.encode("utf-8", "replace").decode()


def storable(completion: NewCompletion) -> NewCompletion:
    """The completion, checked, with lone surrogates in its texts replaced, since they have no UTF-8 form.

    Raises CacheError if the completion cannot be stored.
    """
    names = ("tokenizer", "model", "query", "prompt_fingerprint", "tools", "workflow_step", "text")
    texts: dict[str, Any] = {name: as_stored(getattr(completion, name)) for name in names}
    completion = replace(completion, **texts)
    check_completion(completion)
    return completion


def has_plausible_record(completion: StoredCompletion) -> bool:
    """Whether time and counters are valid; no checksum covers them, since they change."""
    counters = (completion.hits, completion.accepted, completion.rejected)
    whole = all(type(number) is int for number in (completion.id, completion.count, *counters))
    if not whole or completion.count < 1 or min(counters) < 0 or max(completion.count, *counters) > MAX_COUNT:
        return False
    return isinstance(completion.created, int | float) and EARLIEST <= completion.created <= LATEST


def check_completion(completion: NewCompletion) -> None:
    """Raise CacheError if a completion cannot be stored."""
    check_tenant(completion.tenant)
    if not completion.tokenizer:
        raise CacheError("a completion needs its tokenizer's fingerprint; see precedent.cache.tokenizer_fingerprint")
    if not completion.token_ids:
        raise CacheError("a completion without tokens cannot be stored")
    if min(completion.token_ids) < 0 or max(completion.token_ids) > MAX_TOKEN_ID:
        raise CacheError(f"token ids must lie between 0 and {MAX_TOKEN_ID}")
