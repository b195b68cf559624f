"""What verification costs at a large vocabulary, from the target's logits to a verdict; printed by bench_verify.py.

    python tests/benchmarks/verify_cost.py

prints what needs no model: operations of a step's verdicts as a GPU would launch them, and what a seeded choice takes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from gpu_bench.steps import bushy, verdicts
from torch import Tensor

from precedent.config import SamplingParams
from precedent.sampling.coupling import coupled_choice, coupled_noise
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import CandidateTree, Sampled
from precedent.verify import prepare

sys.path.append(str(Path(__file__).parents[1]))

from helpers.operations import Operations

LARGE_VOCABULARY = 150_000
REPEATS = 4


def cost_tree(num_samples: int, num_fixed: int, vocab_size: int, device: str) -> tuple[CandidateTree, Tensor]:
    """A chain of samples beside cached branches, and target logits `[num_nodes + 1, vocab_size]`, float32."""
    generator = torch.Generator().manual_seed(0)
    draft_rows = torch.randn(num_samples, vocab_size, generator=generator).softmax(1).to(device)
    tree = bushy(num_samples + num_fixed, list(draft_rows))
    return tree, torch.randn(len(tree) + 1, vocab_size, generator=generator).to(device)


def measure_cost() -> list[dict[str, object]]:
    """Milliseconds from logits to verdict at 64 nodes and a vocabulary of 150,000, row by row and all at once."""
    lines: list[dict[str, object]] = []
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for num_samples in (0, 6, 64):
            tree, logits = cost_tree(num_samples, 64 - num_samples, LARGE_VOCABULARY, device)
            for way in ("row by row", "ahead"):
                for mode in ("topdown", "traversal"):
                    cost = {"device": device, "samples": num_samples, "way": way, "mode": mode}
                    lines.append(cost | {"milliseconds": _milliseconds(tree, logits, mode, way)})
    return lines


def _milliseconds(tree: CandidateTree, logits: Tensor, mode: str, way: str) -> float:
    params, times = SamplingParams(temperature=1.0), []
    for number in range(REPEATS):
        if logits.is_cuda:
            torch.cuda.synchronize()
        started = perf_counter()
        if way == "ahead":
            verdicts([tree], [logits], params, mode)
        else:
            prepare(tree, TargetRows(logits, tree, params), mode)(CounterRng(3, number))
        times.append((perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def operations(run: Callable[[], object]) -> int:
    """What a run would launch on a GPU."""
    with torch.inference_mode(), Operations() as counting:
        run()
    return len(counting.launched)


def verdicts_of(count: int, tree: CandidateTree, params: SamplingParams, mode: str) -> dict[str, object]:
    """Operations of the verdicts on `count` trees: each by itself, and all together as the decode loop does."""
    logits = [torch.randn(len(tree) + 1, 1000) for _ in range(count)]

    def each() -> None:
        for one in logits:
            verdicts([tree], [one], params, mode)

    together = operations(lambda: verdicts([tree] * count, logits, params, mode))
    num_samples = sum(isinstance(each.distribution, Sampled) for each in tree.candidates)
    return {"mode": mode, "sequences": count, "samples": num_samples,
            "each by itself": operations(each), "together": together}  # fmt: skip


def choice_of(vocab_size: int) -> dict[str, object]:
    """Microseconds of a seeded choice, and of the argmax over the noise of all tokens."""
    probs = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)).mul(3).softmax(0)
    ways: dict[str, Callable[[int], object]] = {
        "choice": lambda place: coupled_choice(probs, 1, place),
        "all logarithms": lambda place: int((probs.double() / coupled_noise(1, place, vocab_size)).argmax()),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for place in range(60):
        for way, choose in ways.items():
            started = perf_counter()
            choose(place)
            times[way].append((perf_counter() - started) * 1e6)
    return {"vocabulary": vocab_size} | {way: round(statistics.median(taken)) for way, taken in times.items()}


if __name__ == "__main__":
    sampled, greedy = SamplingParams(temperature=0.7), SamplingParams()
    print("operations of a step's verdicts, trees of 64 nodes")
    for sequences in (1, 8):
        print(verdicts_of(sequences, bushy(64), sampled, "traversal"))
        print(verdicts_of(sequences, bushy(64), greedy, "greedy"))
        print(verdicts_of(sequences, cost_tree(6, 58, 1000, "cpu")[0], sampled, "traversal"))
    print("microseconds of a seeded choice")
    for size in (49_152, 151_936):
        print(choice_of(size))
