"""The token index at several sizes: building, inserting, matching, memory, and opening it from disk.

    python tests/benchmarks/bench_index.py 10000 100000 1000000 [--json FILE]

Completions are made up: paragraphs of a Zipf-distributed vocabulary with long repeated passages, as agents write them.
Matching is one search of a live context over the whole memory, as recall does it each step, without votes and planning.
Times are of this process alone; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measurement import Measurement, json_option

from precedent.cache import EmbedderIdentity, NewCompletion, SQLiteStore
from precedent.drafters.matching.occurrences import HIT, Weights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context, sorted_segment
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.engine.warm_up import compile_inner_loops

VOCABULARY, LENGTH, PASSAGES = 49_152, 60, 400
TENANT, TOKENIZER = "bench", "tokenizer"
EMBEDDER = EmbedderIdentity("none", "none", 384)
INSERTED = 20_000
SEARCHES = 2_000


def completions(num_tokens: int, seed: int = 7) -> list[list[int]]:
    """Made-up answers of some 60 tokens: a passage that others have as well, then words of their own, by turns."""
    rng = np.random.default_rng(seed)
    passages = [(rng.zipf(1.3, rng.integers(5, 40)) % VOCABULARY).tolist() for _ in range(PASSAGES)]
    answers = []
    while num_tokens > 0:
        answer: list[int] = []
        while len(answer) < LENGTH:
            answer += passages[int(rng.zipf(1.5)) % PASSAGES] + (rng.zipf(1.3, 6) % VOCABULARY).tolist()
        answers.append(answer[: max(1, min(len(answer), num_tokens))])
        num_tokens -= len(answers[-1])
    return answers


def weights_for(index: TokenIndex) -> Weights:
    return Weights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 1e-3)


def match_times(index: TokenIndex, answers: list[list[int]]) -> tuple[float, float]:
    """Median and 99th percentile of one search, in microseconds."""
    rng, weights, times = np.random.default_rng(3), weights_for(index), []
    for _ in range(SEARCHES):
        answer = answers[int(rng.integers(len(answers)))]
        recent = reversed_context(answer[: int(rng.integers(1, len(answer) + 1))])
        started = time.perf_counter()
        index.match(recent, weights, 192)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times), float(np.percentile(times, 99))


def filled(folder: Path, answers: list[list[int]]) -> None:
    """A cache with these completions, as fast as it can be written."""
    store = SQLiteStore.open(folder)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    for number, answer in enumerate(answers):
        new = NewCompletion(tuple(answer), TOKENIZER, "model", TENANT, "q" * 400, f"{number:032x}", text="t" * 250)
        store.insert(new, np.zeros(384, dtype=np.float32), EMBEDDER)
    store.close()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[SQLiteStore, TenantMemory]]:
    store = SQLiteStore.open(folder)
    memory = TenantMemory(store.partition(TENANT, TOKENIZER))
    yield store, memory
    store.close()


def opening(folder: Path) -> tuple[float, int]:
    """Milliseconds until a tenant's memory can be matched, and in how many runs it then lies."""
    with opened(folder) as (store, memory):
        started = time.perf_counter()
        memory.read(store, TENANT, TOKENIZER)
        return (time.perf_counter() - started) * 1e3, memory.index.num_runs


def measured_bytes(folder: Path) -> int:
    """Bytes that an opened memory takes, Python's objects included, as the allocators count them."""
    with opened(folder) as (store, memory):
        tracemalloc.start()
        memory.read(store, TENANT, TOKENIZER)
        store._nothing_after.clear()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return held


def bench(num_tokens: int, folder: Path) -> dict[str, float]:
    answers = completions(num_tokens)
    started = time.perf_counter()
    index = TokenIndex()
    index.load(sorted_segment(dict(enumerate(answers))))
    building = time.perf_counter() - started
    more = completions(INSERTED, seed=11)
    started = time.perf_counter()
    for number, answer in enumerate(more, len(answers)):
        index.append(number, answer)
    inserting = (time.perf_counter() - started) * 1e6 / sum(map(len, more))
    one_by_one = match_times(index, answers)
    pieces = TokenIndex()
    for begin in range(8):
        part = {number: answers[number] for number in range(begin, len(answers), 8)}
        pieces.load(sorted_segment(part))
    in_pieces = match_times(pieces, answers)
    filled(folder, answers)
    without, _ = opening(folder)
    with opened(folder) as (store, memory):
        memory.read(store, TENANT, TOKENIZER)
        started = time.perf_counter()
        memory.seal()
        sealing = time.perf_counter() - started
    sealed, _ = opening(folder)
    on_disk = sum(file.stat().st_size for file in (folder / "precedent.sqlite-index").rglob("*") if file.is_file())
    found = {
        "build, sorted at once, ms": building * 1e3,
        "insert, µs per token": inserting,
        "match, one order and a tail, µs median": one_by_one[0],
        "match, one order and a tail, µs p99": one_by_one[1],
        "match, eight segments, µs median": in_pieces[0],
        "match, eight segments, µs p99": in_pieces[1],
        "memory, bytes per token": measured_bytes(folder) / num_tokens,
        "on disk, bytes per token": on_disk / num_tokens,
        "opening, segments off, ms": without,
        "sealing, ms": sealing * 1e3,
        "opening, segments on, ms": sealed,
    }
    print(f"{num_tokens:>9,} tokens in {len(answers):,} completions")
    for name, value in found.items():
        print(f"  {name:<40}{value:10.2f}", flush=True)
    return {"tokens": num_tokens, "completions": len(answers), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    json_option(parser)
    given = parser.parse_args()
    measurement, found = Measurement(), list[dict[str, float]]()
    compile_inner_loops()
    sorted_segment({1: [1, 2], 2: [3]})
    for size in given.tokens:
        folder = Path(tempfile.mkdtemp(prefix="bench-index-"))
        try:
            found.append(bench(size, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    measurement.write(given.json, {"sizes": found})


if __name__ == "__main__":
    main()
