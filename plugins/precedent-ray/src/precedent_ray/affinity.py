"""Rendezvous hashing with bounded loads: a key stays on one replica, and a hot one spreads over several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

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
