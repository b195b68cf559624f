"""Decoding on a quiet machine and beside other programs: the order desk's requests in several ways.

    python tests/benchmarks/bench_busy.py [--requests 4] [--fixed] [--json FILE] [--record FILE]

Starts the neighbours itself and ends them; let nothing else run meanwhile. Every request is decoded in every way before
the next one. `--fixed` also tries every fixed size of the team with every limit of nodes beside one neighbour.
`--record` writes the milliseconds of steps of several widths while a neighbour comes and goes, for the planner's tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from measurement import Measurement, json_option
from neighbours import coming_and_going, neighbours

from precedent.cache import SpeculationCache
from precedent.planning.costs import CostCurve
from precedent.runtime.processor import processor
from precedent.runtime.team import TEAM, Team
from precedent.target.load.loading import load_draft, load_target
from precedent.tree import chain
from precedent_demo import MAX_TOKENS_PER_TURN, adapted_target, draft_folder, make_database, make_requests
from precedent_demo.demo_runs import WAYS, Bench, Run

MEASURED = ("plain", "cache-only", "both", "repeat")
WARMING = 12
PERIOD = 3.0
"""Seconds that a neighbour stays, and stays away."""

CONDITIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "quiet": nullcontext,
    "one neighbour": partial(neighbours, 1),
    "two neighbours": partial(neighbours, 2),
    "comes and goes": partial(coming_and_going, PERIOD),
    "quiet again": nullcontext,
}

RECORDED_WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48)
RECORDED_ROUNDS = 120


class FixedTeam(Team):
    """A team of one size, whatever else runs."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def size(self, most: int) -> int:
        """The size."""
        return min(most, self._threads)


def main() -> None:
    """Print one table per condition."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=4)
    options.add_argument("--fixed", action="store_true")
    json_option(options)
    options.add_argument("--record", type=Path)
    given = options.parse_args()
    measurement = Measurement()
    bench = loaded()
    if given.record:
        given.record.write_text(json.dumps(recorded(bench), separators=(",", ":")) + "\n")
        return
    print(f"{processor()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads")
    found: dict[str, Any] = {name: measured(bench, name, begin, given.requests) for name, begin in CONDITIONS.items()}
    for name, runs in found.items():
        for each in runs.values():
            each["times_plain"] = each["tokens_per_second"] / runs["plain"]["tokens_per_second"]
        show(name, runs, found["quiet"]["plain"])
    if given.fixed:
        found["fixed"] = fixed(bench, given.requests)
    measurement.write(given.json, found)
    bench.close()


def loaded() -> Bench:
    """The order desk's pair, with a cache in memory that other requests have warmed."""
    model, tokenizer = load_target(str(adapted_target()))
    draft = load_draft(str(draft_folder()), model, tokenizer)
    ways = [way for way in WAYS if way.name in MEASURED]
    cache = SpeculationCache.open(None)
    cache.warm_up()
    bench = Bench(model, tokenizer, "order desk", draft, cache, ways, temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN)
    for request in make_requests("A", full=False, seed=0)[:WARMING]:
        bench.warm(request, make_database(seed=0))
    return bench


def measured(
    bench: Bench, name: str, begin: Callable[[], AbstractContextManager[Any]], number: int
) -> dict[str, dict[str, Any]]:
    """Every way's figures under one condition."""
    bench.runs = {way: Run(way) for way in bench.engines}
    desk = make_database(seed=0)
    with begin():
        for request in make_requests("B", full=False, seed=0)[:number]:
            for way in bench.engines:
                bench.measure(request, desk, way)
    return {way: figures(bench, way) for way in bench.engines}


def figures(bench: Bench, way: str) -> dict[str, Any]:
    """A way's speed, and what its planner believes."""
    run, cost = bench.runs[way].as_dict(), bench.engines[way].planner.cost
    return {
        "tokens_per_second": run["tokens_per_second"],
        "tokens_per_step": run["tokens_per_step"],
        "request_seconds": run["prefill_seconds"] + run["decode_seconds"],
        "milliseconds_per_step": run["milliseconds_per_step"],
        "load": round(cost.load, 2),
        "threads": bench.engines[way].target.runner.threads,
        "step_milliseconds_by_width": {width: round(each, 1) for width, each in cost.as_dict().items()},
    }


def show(name: str, runs: dict[str, dict[str, Any]], quiet: dict[str, Any]) -> None:
    """One condition's table."""
    plain = runs["plain"]
    print(f"\n{name}: plain {plain['tokens_per_second'] / quiet['tokens_per_second']:.2f} of quiet plain")
    for way, each in runs.items():
        whole = plain["request_seconds"] / each["request_seconds"]
        print(
            f"  {way:12} {each['tokens_per_second']:7.1f} tok/s {each['times_plain']:5.2f}x   requests {whole:5.2f}x   "
            f"{each['tokens_per_step']:5.2f} tokens/step   load {each['load']:.2f}, {each['threads']} threads, "
            f"steps {' '.join(f'{width}:{ms}' for width, ms in list(each['step_milliseconds_by_width'].items())[:8])}"
        )


def fixed(bench: Bench, number: int) -> dict[str, float]:
    """Tokens per second of `both` beside one neighbour: as chosen, and with every fixed team and limit of nodes."""
    engine, found = bench.engines["both"], {}
    learned, config = engine.planner.cost, engine.speculation
    choices: Sequence[tuple[int, int]] = [
        (threads, nodes) for threads in range(1, torch.get_num_threads() + 1) for nodes in (2, 4, 8, 16, 32)
    ]
    with neighbours(1):
        found["chosen"] = speed_of(bench, number)
        for threads, nodes in choices:
            engine.target.runner.team, engine.planner.cost = FixedTeam(threads), CostCurve()
            engine.speculation = dataclasses.replace(config, max_nodes=nodes)
            found[f"{threads} threads, {nodes} nodes"] = speed_of(bench, number)
        engine.target.runner.team, engine.planner.cost, engine.speculation = TEAM, learned, config
        found["chosen again"] = speed_of(bench, number)
    for name, speed in found.items():
        print(f"  {name:22} {speed:6.1f} tok/s")
    return found


def speed_of(bench: Bench, number: int) -> float:
    """Tokens per second of `both`."""
    bench.runs["both"] = Run("both")
    for request in make_requests("B", full=False, seed=0)[:number]:
        bench.measure(request, make_database(seed=0), "both")
    return float(bench.runs["both"].as_dict()["tokens_per_second"])


def recorded(bench: Bench) -> dict[str, Any]:
    """Milliseconds of steps of several widths, round after round, while a neighbour comes and goes."""
    target, rounds = bench.engines["plain"].target, []
    slot = target.new_slot()
    target.prefill(slot, list(range(100, 700)))
    with coming_and_going(PERIOD):
        for _ in range(RECORDED_ROUNDS):
            times = []
            for width in RECORDED_WIDTHS:
                started = perf_counter()
                target.score([(slot, chain([0] * (width - 1)))])
                times.append(round((perf_counter() - started) * 1e3, 1))
                target.discard(slot)
            rounds.append([target.runner.threads, *times])
    return {"widths": RECORDED_WIDTHS, "threads_and_milliseconds": rounds}


if __name__ == "__main__":
    main()
