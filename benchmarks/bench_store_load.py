"""The PostgreSQL store under load: writers and readers as replicas are, until the latency has doubled.

    .venv-ray/bin/python benchmarks/bench_store_load.py TRACES… [--clients 1 4 16] [--warm 100000] [--json FILE]

Each client is a process with a store of its own. It writes recorded answers as replicas do after a request, or reads
what a request needs: the embedder, the stamp, new completions, the nearest ones. The server is a temporary one on this
machine, which waits for the disk; clients and server share its processors. `--warm` fills a tenant with made-up
completions and times what a new replica reads before its first request.
"""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np

from made_up import AT_ONCE, BOUNDS, DIMENSION, EMBEDDER, INDEX_BYTES, TENANT, TOKENIZER, Traces
from measuring import options, run, seconds
from precedent.cache import Completion, Selection
from precedent.cache.index import SimilarityIndex
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.target.load.loading import load_tokenizer
from precedent.text.traces import read_trajectories
from precedent_postgres import PostgresStore
from precedent_postgres.testing import TemporaryServer
from precedent_replay.turns import TurnReader

NEAREST, MOST_RECORDED = 64, 3000


def recorded(paths: Sequence[Path]) -> list[Completion]:
    """Read answers from traces as a replica stores them; their group is their tenant."""
    reader = TurnReader(load_tokenizer("smollm2-135m-instruct"))
    turns = (turn for trajectory in read_trajectories(paths) for turn in reader.turns(trajectory))
    return [
        Completion(turn.token_ids, TOKENIZER, "model", turn.group or "one", turn.query, text=turn.text[:4000])
        for turn in islice(turns, MOST_RECORDED)
    ]


def client(kind: str, url: str, number: int, completions: list[Completion], most: float, ready: Any, told: Any) -> None:
    """Make one replica's calls for `most` seconds, and report the milliseconds of each."""
    store, times = PostgresStore(url, bounds=BOUNDS), list[float]()
    tenants = sorted({one.tenant for one in completions})
    work = writing(store, number, completions) if kind == "write" else reading(store, number, tenants)
    for _ in range(3 if kind == "write" else len(tenants)):
        next(work)  # a reader's first request of a tenant reads all of it, which is what `--warm` measures
    ready.wait()
    ends = perf_counter() + most
    while perf_counter() < ends:
        times.append(seconds(lambda: next(work)) * 1e3)
    told.put(times)
    store.close()


def writing(store: PostgresStore, number: int, completions: list[Completion]) -> Iterator[None]:
    """Insert completions that differ from those of all other clients."""
    made = np.random.default_rng(number).normal(size=(500, DIMENSION)).astype(np.float32)
    vectors = cycle(made / np.linalg.norm(made, axis=1, keepdims=True))
    for turn, one in enumerate(cycle(completions[number % 7 :])):
        ids, query = (*one.token_ids, number, turn), f"{one.query} {os.getpid()} {turn}"
        new = Completion(ids, TOKENIZER, "model", one.tenant, query, text=one.text)
        store.insert(new, next(vectors), EMBEDDER)
        yield


def reading(store: PostgresStore, number: int, tenants: list[str]) -> Iterator[None]:
    """Read what a tenant's request needs when its replica follows the store."""
    seen, start = dict.fromkeys(tenants, 0), number % len(tenants)
    for tenant in cycle(tenants[start:] + tenants[:start]):
        store.embedder()
        store.stamp()
        store.epoch()
        new = store.since(tenant, TOKENIZER, seen[tenant])
        store.vectors_since(tenant, TOKENIZER, seen[tenant])
        seen[tenant] = max([seen[tenant], *(one.id for one in new)])
        store.list(Selection(tenant=tenant, ids=tuple(range(1, NEAREST + 1))), None)
        yield


def load(url: str, writers: int, readers: int, completions: list[Completion], most: float) -> dict[str, Any]:
    """Calls per second and their milliseconds while so many clients run."""
    context, kinds = multiprocessing.get_context("spawn"), ["write"] * writers + ["read"] * readers
    ready, queues = context.Barrier(len(kinds)), {kind: context.Queue() for kind in dict.fromkeys(kinds)}
    running = [
        context.Process(target=client, args=(kind, url, number, completions, most, ready, queues[kind]))
        for number, kind in enumerate(kinds)
    ]
    for one in running:
        one.start()
    named = ((writers, "writers"), (readers, "readers"))
    found: dict[str, Any] = {"name": ", ".join(f"{number} {kind}" for number, kind in named if number)}
    for kind, queue in queues.items():
        times = [time for _ in range(kinds.count(kind)) for time in queue.get()]
        latency = {"median_ms": median(times), "p95_ms": quantiles(times, n=20)[-1] if len(times) > 1 else times[0]}
        found[kind] = {"per_second": len(times) / most, **latency}
    for one in running:
        one.join()
    print(found, flush=True)
    return found


def warm(url: str, count: int) -> dict[str, Any]:
    """Seconds that a new replica takes to read `count` completions of one tenant, and their vectors."""
    store, traces = PostgresStore(url, bounds=BOUNDS), Traces()
    for begin in range(0, count, AT_ONCE):
        numbers = range(begin, min(begin + AT_ONCE, count))
        made = zip(map(traces.completion, numbers), traces.vectors(begin, AT_ONCE), strict=False)
        store.restore([replace(one, created=1.0, vector=vector) for one, vector in made], EMBEDDER)
    memory, index = TenantMemory(None, INDEX_BYTES), SimilarityIndex(store)
    tokens = seconds(lambda: memory.read(store, TENANT, TOKENIZER))  # type: ignore[arg-type]
    vectors = seconds(lambda: index.search(traces.vectors(0, 1)[0], TENANT, TOKENIZER, 1))
    store.close()
    times = {"tokens_seconds": tokens, "vectors_seconds": vectors}
    return {"completions": count, **times, "memory_mebibytes": memory.num_bytes / 2**20}


def measure(given: Namespace) -> dict[str, Any]:
    completions, found = recorded(given.traces), {"load": list[dict[str, Any]]()}
    numbers = given.clients
    with TemporaryServer(durable=True) as server:
        for writers, readers in [(n, 0) for n in numbers] + [(0, n) for n in numbers] + [(n, n) for n in numbers]:
            for statement in ("VACUUM ANALYZE", "CHECKPOINT"):
                server.execute(statement)
            found["load"].append(load(server.url, writers, readers, completions, given.seconds))
        if given.warm:
            server.execute("TRUNCATE precedent.completion, precedent.tenant, precedent.gone")
            found["warm"] = warm(server.url, given.warm)  # type: ignore[assignment]
    return found


if __name__ == "__main__":
    asked = options(__doc__, clients=[1, 4, 16], seconds=10.0, warm=0)
    asked.add_argument("traces", type=Path, nargs="+")
    run(asked, measure)
