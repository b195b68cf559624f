"""The PostgreSQL store alone under load: writers and readers as replicas are, until the latency has doubled.

    python tests/benchmarks/bench_store_load.py TRACES… [--clients 1 4 16] [--seconds 10] [--warm 100000] [--json FILE]

Each client is a process with a store of its own. It writes recorded answers as replicas do after a request, or asks
what a request asks of the store: the embedder, the stamp, what is new, its nearest completions. The server is a
temporary one on this machine, which waits for the disk; clients and server share its processors. `--warm` fills a
tenant with made-up completions and times what a new replica reads before its first request.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bench_store import AT_ONCE, BOUNDS, DIMENSION, EMBEDDER, INDEX_BYTES, TENANT, TOKENIZER, Traces
from measurement import Measurement, json_option

from precedent.cache import NewCompletion
from precedent.cache.backend import Record, Selection
from precedent.cache.search.index import SimilarityIndex
from precedent.cache.store.records import StoredCompletion
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.target.load.loading import load_tokenizer
from precedent.text.traces import read_trajectories
from precedent_postgres import PostgresStore
from precedent_postgres.testing import TemporaryServer
from precedent_replay.turns import TurnReader

NEAREST = 64
MOST_RECORDED = 3000
TRANSACTIONS_OF_A_READ = 6


def recorded(paths: Sequence[Path]) -> list[NewCompletion]:
    """Answers of traces as a replica stores them; their group is their tenant."""
    reader, found = TurnReader(load_tokenizer("smollm2-135m-instruct")), list[NewCompletion]()
    for trajectory in read_trajectories(paths):
        for turn in reader.turns(trajectory):
            text = turn.text[:4000]
            found.append(NewCompletion(turn.token_ids, TOKENIZER, "model", turn.group or "one", turn.query, text=text))
            if len(found) == MOST_RECORDED:
                return found
    return found


def vectors(number: int, seed: int) -> Iterator[Any]:
    random = np.random.default_rng(seed)
    made = random.normal(size=(number, DIMENSION)).astype(np.float32)
    yield from cycle(made / np.linalg.norm(made, axis=1, keepdims=True))


def client(
    kind: str, url: str, number: int, completions: list[NewCompletion], seconds: float, ready: Barrier, told: Any
) -> None:
    """One replica's calls for so many seconds; tells the milliseconds of each."""
    store, times = PostgresStore(url, bounds=BOUNDS), list[float]()
    work = writing(store, number, completions) if kind == "write" else reading(store, number, completions)
    for _ in range(3 if kind == "write" else len({one.tenant for one in completions})):
        next(work)  # a reader's first request of a tenant reads all of it, which is what `--warm` measures
    ready.wait()
    ends = perf_counter() + seconds
    while perf_counter() < ends:
        started = perf_counter()
        next(work)
        times.append((perf_counter() - started) * 1e3)
    told.put(times)
    store.close()


def writing(store: PostgresStore, number: int, completions: list[NewCompletion]) -> Iterator[None]:
    """Insertions, each another completion than those of all other clients."""
    made = vectors(500, number)
    for turn, one in enumerate(cycle(completions[number % 7 :])):
        store.insert(
            NewCompletion(
                (*one.token_ids, number, turn),
                TOKENIZER,
                "model",
                one.tenant,
                f"{one.query} {os.getpid()} {turn}",
                text=one.text,
            ),
            next(made),
            EMBEDDER,
        )
        yield


def reading(store: PostgresStore, number: int, completions: list[NewCompletion]) -> Iterator[None]:
    """What a request of a tenant asks, when its replica follows the store."""
    tenants = sorted({one.tenant for one in completions})
    seen = dict.fromkeys(tenants, 0)
    for tenant in cycle(tenants[number % len(tenants) :] + tenants[: number % len(tenants)]):
        store.embedder()
        store.stamp()
        store.epoch()
        new = store.since(tenant, TOKENIZER, seen[tenant])
        store.vectors_since(tenant, TOKENIZER, seen[tenant])
        seen[tenant] = max([seen[tenant], *(one.id for one in new)])
        store.list(Selection(tenant=tenant, ids=tuple(range(1, NEAREST + 1))), None)
        yield


def load(url: str, writers: int, readers: int, completions: list[NewCompletion], seconds: float) -> dict[str, Any]:
    """Calls per second and their milliseconds while so many clients run."""
    context = multiprocessing.get_context("spawn")
    ready, queues = context.Barrier(writers + readers), {kind: context.Queue() for kind in ("write", "read")}
    kinds = ["write"] * writers + ["read"] * readers
    running = [
        context.Process(target=client, args=(kind, url, number, completions, seconds, ready, queues[kind]))
        for number, kind in enumerate(kinds)
    ]
    for one in running:
        one.start()
    times = {kind: [time for _ in range(kinds.count(kind)) for time in queues[kind].get()] for kind in queues}
    for one in running:
        one.join()
    figures = {kind: _figures(found, seconds) for kind, found in times.items() if found}
    name = ", ".join(f"{number} {kind}" for number, kind in ((writers, "writers"), (readers, "readers")) if number)
    return {"name": name, "writers": writers, "readers": readers, **figures}


def _figures(times: list[float], seconds: float) -> dict[str, float]:
    return {
        "per_second": round(len(times) / seconds, 1),
        "median_ms": round(median(times), 2),
        "p95_ms": round(quantiles(times, n=20)[-1] if len(times) > 1 else times[0], 2),
    }


def warm(url: str, count: int) -> dict[str, Any]:
    """Seconds that a new replica takes to read `count` completions of one tenant, and their vectors."""
    store, traces = PostgresStore(url, bounds=BOUNDS), Traces()
    for begin in range(0, count, AT_ONCE):
        made = traces.vectors(begin, AT_ONCE)
        records = [
            Record(_stored(traces.completion(begin + at)), made[at]) for at in range(min(AT_ONCE, count - begin))
        ]
        store.restore(records, EMBEDDER)
    memory, found = TenantMemory(None, INDEX_BYTES), {"completions": count}
    started = perf_counter()
    memory.read(store, TENANT, TOKENIZER)  # type: ignore[arg-type]
    found["tokens_seconds"] = round(perf_counter() - started, 2)  # type: ignore[assignment]
    started = perf_counter()
    SimilarityIndex(store).search(traces.vectors(0, 1)[0], TENANT, TOKENIZER, 1)
    found["vectors_seconds"] = round(perf_counter() - started, 2)  # type: ignore[assignment]
    found["memory_mebibytes"] = round(memory.num_bytes / 2**20)
    store.close()
    return found


def _stored(one: NewCompletion) -> StoredCompletion:
    return StoredCompletion(
        one.token_ids, one.tokenizer, one.model, one.tenant, query=one.query, text=one.text, created=1.0
    )


def main() -> None:
    """Measure, print a table, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm", type=int, default=0)
    json_option(parser)
    args = parser.parse_args()
    measurement = Measurement()
    completions, rows = recorded(args.traces), list[dict[str, Any]]()
    found: dict[str, Any] = {"load": rows}
    with TemporaryServer(durable=True) as server:
        print(f"{'clients':>20}  {'calls/s':>9}  {'median ms':>9}  {'p95 ms':>8}")
        for writers, readers in (
            [(n, 0) for n in args.clients] + [(0, n) for n in args.clients] + [(n, n) for n in args.clients]
        ):
            for statement in ("VACUUM ANALYZE", "CHECKPOINT"):
                server.execute(statement)
            rows.append(load(server.url, writers, readers, completions, args.seconds))
            for kind in ("write", "read"):
                if kind in rows[-1]:
                    one, what = rows[-1][kind], f"{writers} writers {readers} readers {kind}"
                    print(
                        f"{what:>30}  {one['per_second']:9.1f}  {one['median_ms']:9.2f}  {one['p95_ms']:8.2f}",
                        flush=True,
                    )
        if args.warm:
            server.execute("TRUNCATE precedent.completion, precedent.tenant, precedent.gone")
            found["warm"] = warm(server.url, args.warm)
            print(found["warm"])
    measurement.write(args.json, found)


if __name__ == "__main__":
    main()
