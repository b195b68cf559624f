"""What verification costs at a large vocabulary, from the target's logits to a verdict; printed by bench_verify.py."""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.sampling import CounterCoins, TargetRows
from precedent.tree import ROOT, CandidateTree, Drawn, TreeBuilder
from precedent.verify import prepare

LARGE_VOCABULARY = 150_000
REPEATS = 4


def cost_tree(num_draws: int, num_points: int, vocab_size: int, device: str) -> tuple[CandidateTree, Tensor]:
    """A chain of draws beside cached branches, and target logits `[num_nodes + 1, vocab_size]`, float32."""
    generator = torch.Generator().manual_seed(0)
    builder, branches, node = TreeBuilder(), [ROOT] * 4, ROOT
    for number in range(num_points):
        branches[number % 4] = builder.add_point(branches[number % 4], number % 4, "cache")
    for _ in range(num_draws):
        row = torch.randn(vocab_size, generator=generator).softmax(0).to(device)
        node = builder.add_draw(node, 10, Drawn(row, builder.children(node)), "draft")
    tree = builder.build()
    return tree, torch.randn(len(tree) + 1, vocab_size, generator=generator).to(device)


def measure_cost() -> list[dict[str, object]]:
    """Milliseconds from logits to verdict at 64 nodes and a vocabulary of 150,000, row by row and all at once."""
    lines: list[dict[str, object]] = []
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for num_draws in (0, 6, 64):
            tree, logits = cost_tree(num_draws, 64 - num_draws, LARGE_VOCABULARY, device)
            for batched in (False, True):
                for mode in ("topdown", "traversal"):
                    backend = "batched" if batched else "reference"
                    cost = {"device": device, "draws": num_draws, "backend": backend, "mode": mode}
                    lines.append(cost | {"milliseconds": _milliseconds(tree, logits, mode, batched)})
    return lines


def _milliseconds(tree: CandidateTree, logits: Tensor, mode: str, batched: bool) -> float:
    params, times = SamplingParams(temperature=1.0), []
    for number in range(REPEATS):
        if logits.is_cuda:
            torch.cuda.synchronize()
        started = perf_counter()
        rows = TargetRows(logits, tree, params, at_once=batched)
        prepare(tree, rows, mode, batched=batched)(CounterCoins(3, number))
        times.append((perf_counter() - started) * 1e3)
    return statistics.median(times[1:])
