"""What verification costs at a large vocabulary, from target probabilities to verdict; printed by bench_verify.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from precedent.sampling import CounterCoins
from precedent.tree import ROOT, CandidateTree, Drawn, TreeBuilder
from precedent.verify import Weights
from precedent.verify.batched import BatchedWeights
from precedent.verify.walk import walk

LARGE_VOCABULARY = 150_000
REPEATS = 4


def cost_tree(num_draws: int, num_points: int, vocab_size: int, device: str) -> tuple[CandidateTree, Tensor]:
    """A chain of draws beside cached branches, and target probabilities `[num_nodes + 1, vocab_size]`, float32."""
    generator = torch.Generator().manual_seed(0)
    builder, branches, node = TreeBuilder(), [ROOT] * 4, ROOT
    for number in range(num_points):
        branches[number % 4] = builder.add_point(branches[number % 4], number % 4, "cache")
    for _ in range(num_draws):
        row = torch.randn(vocab_size, generator=generator).softmax(0).to(device)
        node = builder.add_draw(node, 10, Drawn(row, builder.children(node)), "draft")
    tree = builder.build()
    probs = torch.randn(len(tree) + 1, vocab_size, generator=generator).softmax(1).to(device)
    return tree, probs


def measure_cost() -> list[dict[str, object]]:
    """Milliseconds from target probabilities to verdict at 64 nodes and a vocabulary of 150,000."""
    lines: list[dict[str, object]] = []
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for num_draws in (0, 6, 64):
            tree, probs = cost_tree(num_draws, 64 - num_draws, LARGE_VOCABULARY, device)
            for backend in ("reference", "batched"):
                weigh = _reference if backend == "reference" else BatchedWeights
                for lazy in (False, True):
                    mode = "traversal" if lazy else "topdown"
                    cost = {"device": device, "draws": num_draws, "backend": backend, "mode": mode}
                    lines.append(cost | {"milliseconds": _milliseconds(weigh, tree, probs, lazy)})
    return lines


def _reference(tree: CandidateTree, probs: Tensor, *, lazy: bool) -> Weights:
    return Weights(tree, lambda node: probs[node + 1], lazy=lazy)


def _milliseconds(
    weigh: Callable[..., Weights | BatchedWeights], tree: CandidateTree, probs: Tensor, lazy: bool
) -> float:
    times = []
    for number in range(REPEATS):
        if probs.is_cuda:
            torch.cuda.synchronize()
        started = perf_counter()
        walk(weigh(tree, probs, lazy=lazy), CounterCoins(3, number))
        times.append((perf_counter() - started) * 1e3)
    return statistics.median(times[1:])
