"""The speculation cache at several sizes: insertion, start-up, lookup, memory and disk.

    python benchmarks/bench_store.py 1000 10000 100000 1000000 [--folder DIR] [--json FILE]

Completions are made up in the likeness of agents' answers; embedding is excluded. Each size is filled as fast as SQLite
allows (one transaction per thousand, without waiting for the disk); then single insertions are timed as they happen in
use, and the cache is opened by processes of their own. A completion takes 6 KB on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from measuring import options, run, seconds
from precedent.cache import Bounds, Completion, EmbedderIdentity, SQLiteStore, rows
from precedent.cache.index import SimilarityIndex
from precedent.cache.records import Vector
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.engine.warm_up import compile_inner_loops

SINGLE, LOOKUPS, HITS = 200, 200, 256
DIMENSION, TENANT, TOKENIZER = 384, "bench", "tokenizer"
EMBEDDER = EmbedderIdentity("bench", "bench", DIMENSION)
TOPICS, PASSAGES, LENGTH, VOCABULARY = 300, 2000, 200, 49_152
BOUNDS, INDEX_BYTES, AT_ONCE = Bounds(max_bytes=2**40), 2**33, 1000


class Traces:
    """Requests around a few hundred topics; answers of passages that others share, and of words of their own.

    The same number gives the same completion.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._topics = random.normal(size=(TOPICS, 1, DIMENSION)).astype(np.float32)
        self._variants = 0.7 * random.normal(size=(TOPICS, 40, DIMENSION)).astype(np.float32)
        lengths = random.integers(5, 60, PASSAGES)
        self._passages = [(random.zipf(1.3, length) % VOCABULARY).astype(np.int32) for length in lengths]

    def vectors(self, begin: int, count: int) -> Vector:
        random = np.random.default_rng(begin + 1)
        topics = random.integers(TOPICS, size=count)
        variants = self._variants[topics, random.zipf(1.5, count) % 40]
        found = self._topics[topics, 0] + variants + 0.5 * random.normal(size=(count, DIMENSION)).astype(np.float32)
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)

    def tokens(self, number: int) -> tuple[int, ...]:
        random, parts = np.random.default_rng(number), list[np.ndarray]()
        while sum(map(len, parts)) < LENGTH:
            parts += [self._passages[int(random.zipf(1.4)) % PASSAGES], random.integers(0, VOCABULARY, 6)]
        return tuple(np.concatenate(parts)[:LENGTH].tolist())

    def completion(self, number: int) -> Completion:
        return Completion(self.tokens(number), TOKENIZER, "model", TENANT, f"{number} " + "q" * 300, text="t" * 700)


def fill(folder: Path, count: int, traces: Traces) -> float:
    """Fill a cache; returns the median milliseconds of a single insertion, on disk when it returns."""
    store = SQLiteStore.open(folder, bounds=BOUNDS)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    store.insert(traces.completion(0), traces.vectors(0, 1)[0], EMBEDDER)
    for begin in range(1, count, AT_ONCE):
        with store._database.write() as connection:
            for number, vector in enumerate(traces.vectors(begin, min(AT_ONCE, count - begin)), begin):
                rows.insert_row(connection, replace(traces.completion(number), vector=vector), time.time())
    store.close()
    store, times = SQLiteStore.open(folder, bounds=BOUNDS), []
    for number, vector in enumerate(traces.vectors(count, SINGLE), count):
        new = traces.completion(number)
        times.append(seconds(lambda: store.insert(new, vector, EMBEDDER)) * 1e3)  # noqa: B023  # called at once
    store.close()
    return median(times)


def resident() -> int:
    """Bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def used(folder: Path) -> dict[str, Any]:
    """Open the cache as a starting process does: token index and vectors in parallel, then lookups."""
    compile_inner_loops()
    traces, before, started = Traces(), resident(), time.perf_counter()
    store = SQLiteStore.open(folder, bounds=BOUNDS)
    opened = time.perf_counter() - started
    memory = TenantMemory(INDEX_BYTES, TENANT)
    index, first = SimilarityIndex(store), traces.vectors(7, 1)[0]
    with ThreadPoolExecutor(1) as other:  # as recall does
        reading = other.submit(seconds, lambda: memory.read(store, TOKENIZER))
        searched = seconds(lambda: index.search(first, TENANT, TOKENIZER, HITS))
        read = reading.result()
    ready = time.perf_counter() - started
    held, queries = resident() - before, traces.vectors(10**9, LOOKUPS)
    times = [seconds(lambda: index.search(vector, TENANT, TOKENIZER, HITS)) * 1e3 for vector in queries]  # noqa: B023
    index.close()
    store.close()
    parts = {"open_ms": opened, "token_index_ms": read, "vectors_ms": searched, "start_ms": ready}
    lookups = {"lookup_ms_p50": median(times), "lookup_ms_p99": float(np.percentile(times, 99))}
    return {name: taken * 1e3 for name, taken in parts.items()} | lookups | {"memory_mb": held / 2**20}


def bench(count: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"completions": count, "insert_ms": fill(folder, count, Traces())}
    command = [sys.executable, __file__, "--use", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found["start"] = json.loads(told.splitlines()[-1])
    found["mb_on_disk"] = (folder / "precedent.sqlite").stat().st_size / 2**20
    print(found, flush=True)
    return found


def measure(given: Namespace) -> dict[str, Any]:
    sizes = []
    for count in given.completions:
        with tempfile.TemporaryDirectory(prefix="bench-store-", dir=given.folder) as folder:
            sizes.append(bench(count, Path(folder)))
    return {"sizes": sizes}


if __name__ == "__main__":
    asked = options(__doc__, folder=Path)
    asked.add_argument("completions", nargs="*", type=int, default=[1_000, 10_000, 100_000])
    asked.add_argument("--use", type=Path, help=SUPPRESS)
    own = asked.parse_args()
    if own.use:
        print(json.dumps(used(own.use)))
    else:
        run(asked, measure)
