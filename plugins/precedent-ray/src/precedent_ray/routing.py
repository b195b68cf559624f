"""Where a request goes: the tenant of its API key, and the replicas in the order in which that tenant prefers them.

Rendezvous hashing with bounded loads: a key stays on one replica, and a hot one spreads over several. Whose request it
is says the API key alone, never what a client says of itself.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from precedent_server.access import caller_of
from precedent_server.errors import ApiError
from precedent_server.keys import KeyFile

SLACK = 1.25
"""A replica may hold this many times the mean load before a key that prefers it moves on (Mirrokni et al., 2016)."""


def preferred(key: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order in which `key` prefers them, the same in every process and for every order given.

    A replica that joins or leaves moves the keys that prefer it, and no others (Thaler and Ravishankar, 1998).
    """
    return sorted(replicas, key=lambda replica: (_weight(key, replica), replica), reverse=True)


def with_room(order: Sequence[str], loads: Mapping[str, int], *, spread_from: int) -> list[str]:
    """The same replicas, those that are full last, the least loaded of these first.

    `loads` are requests that run or wait, 0 where a replica is missing. A replica is full once it holds `spread_from`
    requests and `SLACK` times the mean of all, the new request included.
    """
    if not order:
        return []
    load = {replica: loads.get(replica, 0) for replica in order}
    most = max(spread_from, math.ceil(SLACK * (sum(load.values()) + 1) / len(order)))
    free = [replica for replica in order if load[replica] < most]
    full = sorted((replica for replica in order if load[replica] >= most), key=load.__getitem__)
    return free + full


def _weight(key: str, replica: str) -> int:
    name = f"{len(key)}:{key}{replica}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")


def tenant_of(scope: Scope, keys: KeyFile | None) -> str | None:
    """The tenant of a request; None for one that will be refused, which any replica can do."""
    try:
        return caller_of(HTTPConnection(scope), keys).tenant
    except ApiError:
        return None


def scope_of(args: Sequence[Any]) -> Scope | None:
    """The ASGI scope of what Ray's proxy hands to a replica; None for calls that are no HTTP requests."""
    if len(args) != 1 or not isinstance(args[0], bytes):
        return None
    request = pickle.loads(args[0])  # written by the proxy in whose process this runs; no client can write it
    scope: Scope | None = getattr(request, "asgi_scope", None)
    return scope if scope is not None and scope.get("type") == "http" else None
