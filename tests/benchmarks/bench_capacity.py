"""What a fleet pays for each request outside the target: the embedding of a query, and a proxy's choice of a replica.

    python tests/benchmarks/bench_capacity.py [--rounds 5] [--replicas 100] [--json FILE]

One thread embeds short texts one by one and in batches of eight, which take turns; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from measurement import Measurement, json_option

from precedent.cache import SentenceTransformerEmbedder
from precedent.routing import preferred

TEXTS = [f"look_up_order cancel_order: the customer asks about lamp {n}, sent on Monday" for n in range(48)]
BATCHES = {"one by one": 1, "in batches of eight": 8}
KEYS = 200


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = perf_counter()
    work()
    return perf_counter() - begun


def embed(embedder: SentenceTransformerEmbedder, size: int) -> None:
    """Embed all texts, so many at a time."""
    for start in range(0, len(TEXTS), size):
        embedder.embed(TEXTS[start : start + size])


def embedding(rounds: int) -> dict[str, dict[str, float]]:
    """Texts per second of one thread."""
    embedder = SentenceTransformerEmbedder()
    embed(embedder, 8)
    spent: dict[str, list[float]] = {name: [] for name in BATCHES}
    for _ in range(rounds):
        for name, size in BATCHES.items():
            spent[name].append(seconds(lambda size=size: embed(embedder, size)))  # type: ignore[misc]
    return {name: {"texts_per_second": len(TEXTS) / median(found)} for name, found in spent.items()}


def choosing(rounds: int, replicas: Sequence[str]) -> float:
    """Milliseconds to order the replicas for one key."""

    def choose() -> None:
        for key in range(KEYS):
            preferred(f"tenant {key}", replicas)

    return median(seconds(choose) for _ in range(rounds)) / KEYS * 1e3


def main() -> None:
    """Measure, print, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=100)
    json_option(parser)
    given = parser.parse_args()
    measurement = Measurement()
    torch.set_num_threads(1)
    names = [f"replica {number}" for number in range(given.replicas)]
    found: dict[str, Any] = {"embedding": embedding(given.rounds)}
    found["routing"] = {"replicas": given.replicas, "milliseconds": choosing(given.rounds, names)}
    print(json.dumps(found, indent=1))
    measurement.write(given.json, found)


if __name__ == "__main__":
    main()
