"""Decoding on a quiet machine and next to busy programs: the order desk's requests in several ways.

    python benchmarks/bench_busy.py [--requests 4] [--json FILE]

Starts and stops the busy programs itself; let nothing else run meanwhile. Every request is decoded in every way before
the next one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from measuring import options, run
from precedent.cache import SpeculationCache
from precedent.drafters import load_draft
from precedent.target.load.loading import load_target
from precedent_demo import MAX_TOKENS_PER_TURN, adapted_target, draft_folder, make_database, make_requests
from precedent_demo.demo_runs import WAYS, Bench, Run

MEASURED, WARMING = ("plain", "cache-only", "both", "repeat"), 12
PERIOD = 3.0
"""Seconds for which the busy program of "comes and goes" runs, and rests."""


@contextmanager
def neighbours(number: int, period: float | None = None) -> Iterator[None]:
    """Run busy loops, each in a process of its own; with a period they run and rest alternately."""
    with ExitStack() as stack:
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
        for loop in loops:
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        over = threading.Event()

        def alternate() -> None:
            running = True
            while not over.wait(period):
                running = not running
                for loop in loops:
                    loop.send_signal(signal.SIGCONT if running else signal.SIGSTOP)

        if period is not None:
            alternating = threading.Thread(target=alternate)
            alternating.start()
            stack.callback(alternating.join)
            stack.callback(over.set)
        yield


CONDITIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "quiet": nullcontext,
    "one neighbour": partial(neighbours, 1),
    "two neighbours": partial(neighbours, 2),
    "comes and goes": partial(neighbours, 1, PERIOD),
    "quiet again": nullcontext,
}


def measure(given: Namespace) -> dict[str, Any]:
    model, tokenizer = load_target(str(adapted_target()))
    draft, cache = load_draft(str(draft_folder()), model, tokenizer), SpeculationCache.open(None)
    cache.warm_up()
    ways = [way for way in WAYS if way.name in MEASURED]
    bench = Bench(model, tokenizer, "order desk", draft, cache, ways, temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN)
    for request in make_requests("A", full=False, seed=0)[:WARMING]:
        bench.warm(request, make_database(seed=0))
    found = {name: decoded(bench, begin, given.requests) for name, begin in CONDITIONS.items()}
    bench.close()
    return found


def decoded(bench: Bench, begin: Callable[[], AbstractContextManager[Any]], number: int) -> dict[str, Any]:
    bench.runs = {way: Run(way) for way in bench.engines}
    with begin():
        for request in make_requests("B", full=False, seed=0)[:number]:
            for way in bench.engines:
                bench.measure(request, make_database(seed=0), way)
    return {way: figures(bench, way) for way in bench.engines}


def figures(bench: Bench, way: str) -> dict[str, Any]:
    runs = {name: bench.runs[name].as_dict() for name in ("plain", way)}
    cost = bench.engines[way].planner.cost
    return {
        "tokens_per_second": runs[way]["tokens_per_second"],
        "times_plain": runs[way]["tokens_per_second"] / runs["plain"]["tokens_per_second"],
        "tokens_per_step": runs[way]["tokens_per_step"],
        "request_seconds": runs[way]["prefill_seconds"] + runs[way]["decode_seconds"],
        "load": cost.load,
        "threads": bench.engines[way].target.runner.threads,
        "step_milliseconds_by_width": cost.as_dict(),
    }


if __name__ == "__main__":
    run(options(__doc__, requests=4), measure)
