"""What a new replica reads from the store before its first request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from precedent.cache import SpeculationCache, TenantStats
from precedent.drafters.recall.tenant_memory import cost
from precedent.engine.engine import Engine
from precedent.errors import CacheError

log = logging.getLogger("precedent.ray")


def worth_reading(tenants: Iterable[TenantStats], max_bytes: int) -> Iterator[str]:
    """The tenants whose completions saved most tokens, as far as all fit into `max_bytes` of drafting memory."""
    left = max_bytes
    for one in sorted(tenants, key=lambda each: (-each.accepted, -each.tokens, each.tenant)):
        left -= cost(one.records, one.tokens)
        if left < 0:
            return
        yield one.tenant


def read_ahead(
    engines: Iterable[Engine], cache: SpeculationCache, seconds: float, *, clock: Callable[[], float] = monotonic
) -> int:
    """Read the tenants that are worth it into the engines' memories, for at most `seconds`; returns their number.

    A tenant that was begun is finished. A store that is away fails nothing: it is read when requests come.
    """
    recalls = [engine.recall for engine in engines if engine.recall is not None]
    until, number = clock() + seconds, 0
    try:
        for tenant in worth_reading(cache.stats().tenants, cache.max_index_bytes):
            if clock() >= until:
                log.info("read %d tenants ahead; the others are read with their first requests", number)
                break
            for recall in recalls:
                recall.read_ahead(tenant)
            number += 1
    except CacheError as error:
        log.warning("nothing more is read ahead, completions are read with the first requests: %s", error)
    return number
