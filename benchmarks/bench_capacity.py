"""Costs of each request outside the target model: embedding a query, and a proxy's choice of a replica.

python benchmarks/bench_capacity.py [--rounds 5] [--replicas 100] [--json FILE]
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from precedent.routing import preferred

from measuring import medians, options, run
from precedent.cache import SentenceTransformerEmbedder

TEXTS = [f"look_up_order cancel_order: the customer asks about lamp {n}, sent on Monday" for n in range(48)]
KEYS = 200


def measure(given: Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    embedder, replicas = SentenceTransformerEmbedder(), [f"replica {number}" for number in range(given.replicas)]

    def embed(size: int) -> None:
        for start in range(0, len(TEXTS), size):
            embedder.embed(TEXTS[start : start + size])

    embed(8)
    ways = {"one by one": partial(embed, 1), "in batches of eight": partial(embed, 8)}
    spent = medians(ways, given.rounds, 1.0)
    choosing = {"": lambda: [preferred(f"tenant {key}", replicas) for key in range(KEYS)]}
    return {
        "embedding": {way: {"texts_per_second": len(TEXTS) / taken} for way, taken in spent.items()},
        "routing": {"replicas": given.replicas, "milliseconds": medians(choosing, given.rounds)[""] / KEYS},
    }


if __name__ == "__main__":
    run(options(__doc__, rounds=5, replicas=100), measure)
