"""The cache's records, plain and frozen, its bounds, and the checks that keep invalid records out."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.errors import CacheError

MAX_TENANT_LENGTH = 200
MAX_TOKEN_ID = 2**31 - 1

MAX_COUNT = 2**63 - 1
"""The largest counter that a store can hold."""

ACTIONS = "actions:1"
"""In place of a tokenizer's fingerprint: the partition of what agents did (`precedent_run_ahead.actions.decisions`)."""

EARLIEST, LATEST = -60e9, 250e9
"""Range of a record's time in seconds since the epoch: about the years 70 to 9890, which a calendar can show."""

DEFAULT_MAX_BYTES = 512 * 2**20
"""Default limit on the payload bytes (tokens, vectors, texts) of a cache."""

DEFAULT_MAX_PREFIX_BYTES = 2**30
"""Default limit on the KV cache of prompt prefixes on disk."""

DEFAULT_MAX_INDEX_BYTES = 256 * 2**20
"""Default limit on the token indexes that drafting holds: some 20 million tokens."""

Ids = NDArray[np.int64]
"""Ids of completions, `[n]`."""

Vector = NDArray[np.float32]
"""A unit vector, `[dimension]`, or several, `[n, dimension]`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer with the keys under which it may be proposed again, and its record in a store.

    `token_ids` are the ids as generated, the end token included. `tenant` and `tokenizer` (a fingerprint) are hard
    keys; `model`, `tools` and `workflow_step` are soft ones. `query` is the text that is embedded, `prompt_fingerprint`
    marks an exact repeat of the prompt, and `text` is for people who list or search the cache.

    The store sets the other fields. `created` is in seconds since the epoch; `count` is how often the answer was
    written back; `hits` is the number of requests in which at least one of its tokens was accepted; `accepted` and
    `rejected` count tokens. `vector` embeds the query, `[dimension]`; most methods leave it None.
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
    id: int = 0
    created: float = 0.0
    count: int = 1
    hits: int = 0
    accepted: int = 0
    rejected: int = 0
    vector: Vector | None = field(default=None, compare=False, repr=False)

    @property
    def token_bytes(self) -> bytes:
        """Token ids as little-endian int32."""
        return np.asarray(self.token_ids, dtype="<i4").tobytes()

    @property
    def vector_bytes(self) -> bytes | None:
        """The vector as little-endian float32."""
        return None if self.vector is None else self.vector.astype("<f4").tobytes()

    @property
    def identity(self) -> bytes:
        """Equal for two completions of a partition that are the same answer to the same query, 16 bytes."""
        return digest(self.token_bytes, self.query, size=16)

    @property
    def checksum(self) -> bytes:
        """Checksum of everything that never changes except the vector, stored beside a record, 8 bytes."""
        keys = (self.tenant, self.tokenizer, self.model, self.prompt_fingerprint)
        texts = (self.tools, self.workflow_step, self.query, self.text)
        return digest(*keys, *texts, self.token_bytes, size=8)

    @property
    def vector_checksum(self) -> bytes | None:
        """Checksum of the vector, 8 bytes."""
        written = self.vector_bytes
        return None if written is None else vector_checksum(written)

    @property
    def size(self) -> int:
        """Payload bytes: tokens, vector and the two texts."""
        texts = len(self.query.encode()) + len(self.text.encode())
        return 4 * len(self.token_ids) + len(self.vector_bytes or b"") + texts

    @property
    def has_plausible_record(self) -> bool:
        """True if time and counters are valid; no checksum covers them, since they change."""
        counters = (self.hits, self.accepted, self.rejected)
        whole = all(type(number) is int for number in (self.id, self.count, *counters))
        if not whole or self.count < 1 or min(counters) < 0 or max(self.count, *counters) > MAX_COUNT:
            return False
        return isinstance(self.created, int | float) and EARLIEST <= self.created <= LATEST


Completions = list[Completion]

TEXTS = ("tokenizer", "model", "tenant", "query", "prompt_fingerprint", "tools", "workflow_step", "text")
"""The fields of a completion that are texts."""


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

    @classmethod
    def of(cls, tenants: Sequence[TenantStats], **others: Any) -> CacheStats:
        """The summary of these tenants; `others` are all fields that are not sums."""
        sums = {name: sum(getattr(tenant, name) for tenant in tenants) for name in ("records", "tokens", "bytes")}
        return cls(**sums, tenants=tuple(tenants), **others)


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions on the completions to list or forget: all given conditions must hold.

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


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that differs from what was written.

    `kind` is structure, record or vector; `detail` is a line for people; `ids` are the affected records.
    """

    kind: str
    detail: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings of `verify_cache` in the file at `path`; `records` is the number of sound ones."""

    path: str
    records: int
    findings: tuple[Damage, ...]

    @classmethod
    def of(cls, path: str, damages: Sequence[Damage | None]) -> VerifyReport:
        """The report on rows, each with its damage."""
        findings = tuple(damage for damage in damages if damage is not None)
        return cls(path, len(damages) - sum(finding.kind == "record" for finding in findings), findings)

    @property
    def sound(self) -> bool:
        """True if nothing is damaged."""
        return not self.findings


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on total payload bytes, number of completions, seconds since first stored, and payload bytes per tenant.

    `max_prefix_bytes` bounds the KV cache kept beside a cache on disk, whose age `max_age` bounds too. None means no
    limit. Raises CacheError for a limit below 1.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    max_records: int | None = None
    max_age: float | None = None
    max_tenant_bytes: int | None = None
    max_prefix_bytes: int = DEFAULT_MAX_PREFIX_BYTES

    def __post_init__(self) -> None:
        for bound in fields(self):
            value = getattr(self, bound.name)
            if value is not None and not value >= 1:
                raise CacheError(f"{bound.name}={value} must be at least 1")

    @property
    def largest(self) -> int:
        """Payload bytes of the largest completion that fits."""
        return min(self.max_bytes, self.max_tenant_bytes or self.max_bytes)


def digest(*parts: str | bytes, size: int) -> bytes:
    """A hash of `size` bytes over the parts; includes their lengths, so different lists of parts never coincide."""
    data = [part.encode() if isinstance(part, str) else part for part in parts]
    lengths = struct.pack(f"<{len(data)}q", *map(len, data))
    return hashlib.blake2b(lengths + b"".join(data), digest_size=size).digest()


def vector_checksum(vector_bytes: bytes) -> bytes:
    """The checksum stored beside a vector, 8 bytes."""
    return digest(vector_bytes, size=8)


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


def storable(completion: Completion, vector: Vector | None = None) -> Completion:
    """The completion as a store keeps it, with lone surrogates replaced; `vector` replaces the one that it has.

    Raises CacheError if it cannot be stored.
    """
    check_tenant(completion.tenant)
    if not completion.tokenizer:
        raise CacheError("a completion needs its tokenizer's fingerprint; see precedent.cache.tokenizer_fingerprint")
    if not completion.token_ids:
        raise CacheError("a completion without tokens cannot be stored")
    if min(completion.token_ids) < 0 or max(completion.token_ids) > MAX_TOKEN_ID:
        raise CacheError(f"token ids must lie between 0 and {MAX_TOKEN_ID}")
    if not completion.has_plausible_record:
        counters = (completion.hits, completion.accepted, completion.rejected)
        raise CacheError(
            f"a record has an impossible time or counters ({completion.created}, {completion.count}, {counters}); "
            "export it again"
        )
    texts: dict[str, Any] = {name: as_stored(getattr(completion, name)) for name in TEXTS}
    return replace(completion, vector=completion.vector if vector is None else vector, **texts)
