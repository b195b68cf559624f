"""The speculation cache at several sizes: insertion, start-up, lookup, memory and disk.

    python tests/benchmarks/bench_store.py 1000 10000 100000 1000000 [--json FILE]

Completions are made up in the likeness of agents' traces: requests lie around a few hundred topics, answers of some 200
tokens consist of passages that others have as well and of words of their own. Vectors have 384 dimensions; embedding
takes no part. Each size is filled once, as fast as SQLite takes it (one transaction per thousand, without waiting for
the disk); then single insertions are timed as they happen in use, and the cache is opened by processes of their own.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from measurement import Measurement, json_option

from precedent.cache import Bounds, EmbedderIdentity, NewCompletion, SQLiteStore
from precedent.cache.search.index import SimilarityIndex
from precedent.cache.store import rows
from precedent.cache.store.records import Payload, Vector
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.engine.warm_up import compile_inner_loops

DIMENSION, TENANT, TOKENIZER = 384, "bench", "tokenizer"
EMBEDDER = EmbedderIdentity("bench", "bench", DIMENSION)
TOPICS, PASSAGES, LENGTH, VOCABULARY = 300, 2000, 200, 49_152
SINGLE, LOOKUPS, HITS, AT_ONCE = 200, 200, 256, 1000
BOUNDS = Bounds(max_bytes=2**40)
INDEX_BYTES = 2**33


class Traces:
    """Made-up requests and answers; the same number gives the same completion."""

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
        random = np.random.default_rng(number)
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < LENGTH:
            parts += [self._passages[int(random.zipf(1.4)) % PASSAGES], random.integers(0, VOCABULARY, 6)]
        return tuple(np.concatenate(parts)[:LENGTH].tolist())

    def completion(self, number: int) -> NewCompletion:
        return NewCompletion(self.tokens(number), TOKENIZER, "model", TENANT, f"{number} " + "q" * 300, text="t" * 700)


def fill(folder: Path, count: int, traces: Traces) -> float:
    """Completions per second."""
    store = SQLiteStore.open(folder, bounds=BOUNDS)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    started = time.perf_counter()
    store.insert(traces.completion(0), traces.vectors(0, 1)[0], EMBEDDER)
    for begin in range(1, count, AT_ONCE):
        vectors = traces.vectors(begin, min(AT_ONCE, count - begin))
        with store._database.write() as connection:
            for number, vector in enumerate(vectors, begin):
                rows.insert_row(connection, Payload(traces.completion(number), vector), time.time())
    store.close()
    return count / (time.perf_counter() - started)


def insertion(folder: Path, count: int, traces: Traces) -> float:
    """Median milliseconds of one insertion, on disk when it returns."""
    store, times = SQLiteStore.open(folder, bounds=BOUNDS), []
    vectors = traces.vectors(count, SINGLE)
    for number, vector in enumerate(vectors, count):
        new = traces.completion(number)
        started = time.perf_counter()
        store.insert(new, vector, EMBEDDER)
        times.append((time.perf_counter() - started) * 1e3)
    store.close()
    return statistics.median(times)


def resident() -> int:
    """Bytes of this process's memory that no file could give back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def used(folder: Path) -> dict[str, Any]:
    """Open the cache as a process does that starts: token index and vectors side by side, then lookups."""
    compile_inner_loops()
    traces, before = Traces(), resident()
    started = time.perf_counter()
    store = SQLiteStore.open(folder, bounds=BOUNDS)
    opened = time.perf_counter()
    memory = TenantMemory(store.partition(TENANT, TOKENIZER), INDEX_BYTES)
    index, times, first = SimilarityIndex(store, store.partition_vectors), [], traces.vectors(7, 1)[0]
    with ThreadPoolExecutor(1) as beside:  # as recall does
        reading = beside.submit(seconds, lambda: memory.read(store, TENANT, TOKENIZER))
        searched = seconds(lambda: index.search(first, TENANT, TOKENIZER, HITS))
        read = reading.result()
    ready = time.perf_counter()
    index.wait()
    memory.tidy()
    memory.seal()
    held = resident() - before
    for vector in traces.vectors(10**9, LOOKUPS):
        asked = time.perf_counter()
        index.search(vector, TENANT, TOKENIZER, HITS)
        times.append((time.perf_counter() - asked) * 1e3)
    found = {
        "open_ms": (opened - started) * 1e3,
        "token_index_ms": read * 1e3,
        "vectors_ms": searched * 1e3,
        "start_ms": (ready - started) * 1e3,
        "lookup_ms_p50": statistics.median(times),
        "lookup_ms_p99": float(np.percentile(times, 99)),
        "memory_mb": held / 2**20,
        "recall_at_10": recall(index, store, traces),
    }
    index.close()
    store.close()
    return found


def recall(index: SimilarityIndex, store: SQLiteStore, traces: Traces, k: int = 10, asked: int = 20) -> float:
    """The share of the exact nearest that lookup finds, every vector of the table compared."""
    queries = traces.vectors(10**9, asked)
    shelf = store.partition_vectors(TENANT, TOKENIZER)
    ids, scores = np.empty(0, np.int64), np.empty((0, asked), np.float32)
    for page, vectors in shelf.pages(shelf.ids()):
        ids, scores = np.concatenate([ids, page]), np.concatenate([scores, vectors @ queries.T])
        if len(ids) > 50_000:
            best = np.unique(np.argpartition(-scores, k, axis=0)[:k])
            ids, scores = ids[best], scores[best]
    share = []
    for column, query in enumerate(queries):
        exact = set(ids[np.argsort(-scores[:, column])[:k]].tolist())
        share.append(len(exact & {hit.completion_id for hit in index.search(query, TENANT, TOKENIZER, k)}) / k)
    return float(np.mean(share))


def in_a_process_of_its_own(folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--use", str(folder)]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]))


def bench(count: int, folder: Path) -> dict[str, Any]:
    """One size's figures, printed as they come."""
    traces, starts = Traces(), dict[str, Any]()
    print(f"{count:,} completions of {LENGTH} tokens", flush=True)
    print(f"  fill               {fill(folder, count, traces):10.0f} per second")
    insert = insertion(folder, count, traces)
    print(f"  insert             {insert:10.1f} ms, on disk", flush=True)
    for name in ("first start", "later start"):  # the first groups the vectors and seals the token index
        found = starts[name] = in_a_process_of_its_own(folder)
        parts = f"open {found['open_ms']:.0f}, tokens {found['token_index_ms']:.0f}, vectors {found['vectors_ms']:.0f}"
        print(f"  {name}        {found['start_ms']:10.0f} ms ({parts})", flush=True)
    print(f"  lookup             {found['lookup_ms_p50']:10.2f} ms median {found['lookup_ms_p99']:8.2f} ms p99")
    print(f"  recall at 10       {found['recall_at_10']:10.3f}")
    print(f"  memory             {found['memory_mb']:10.0f} MB")
    sizes = {}
    for name in ("precedent.sqlite", "precedent.sqlite-index"):
        files = [folder / name] if (folder / name).is_file() else [f for f in (folder / name).rglob("*") if f.is_file()]
        sizes[name] = sum(file.stat().st_size for file in files) / 2**20
        print(f"  {name:<24} {sizes[name]:10.0f} MB", flush=True)
    return {"completions": count, "insert_ms": insert, **starts, "mb_on_disk": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("completions", nargs="*", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--use", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to put the caches, which take 6 KB per completion")
    json_option(parser)
    given = parser.parse_args()
    if given.use is not None:
        print(json.dumps(used(given.use)))
        return
    measurement, found = Measurement(), list[dict[str, Any]]()
    for count in given.completions:
        folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=given.folder))
        try:
            found.append(bench(count, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    measurement.write(given.json, {"sizes": found})


if __name__ == "__main__":
    main()
