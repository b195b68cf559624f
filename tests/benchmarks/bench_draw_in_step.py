"""Several requests at once with a draft model: one forward per sampled token for all of them, against one for each.

    python tests/benchmarks/bench_draw_in_step.py [--requests 8] [--at-once 4] [--rounds 3] [--json FILE]

The order desk's own pair drafts alone, without a cache. Both ways have an engine over the same weights and take turns;
the first round of each is for learning what samples cost. Plain decoding is measured beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from measurement import Measurement, json_option

from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.generation import GenerationResult
from precedent.langchain import ChatPrecedent
from precedent.target import TargetModel
from precedent.target.load.loading import load_draft, load_target
from precedent.tree import EMPTY_TREE
from precedent_demo import MAX_TOKENS_PER_TURN, adapted_target, draft_folder, make_database, make_requests, run_request

WAYS = ("plain", "one by one", "in step")

GROUP = "precedent.drafters.model.drafter._DraftModelSession.group"
"""What sessions have in common that draw together."""


class Side:
    """One way, its engine, and what its rounds took."""

    def __init__(self, way: str, engine: Engine, results: list[GenerationResult]) -> None:
        self.way, self._engine, self._results = way, engine, results
        self.rates: list[float] = []
        self.samples: list[float] = []
        self.texts: list[tuple[int, ...]] = []

    def serve(self, requests: Sequence[object], at_once: int) -> None:
        """Serve all requests and note tokens per second of all together."""
        self._results.clear()
        started = perf_counter()
        apart = patch(GROUP, property(lambda session: session)) if self.way == "one by one" else nullcontext()
        with apart, ThreadPoolExecutor(at_once) as threads:
            list(threads.map(self._run, requests))
        seconds = perf_counter() - started
        stats = [result.stats for result in self._results]
        self.rates.append(sum(each.num_output_tokens for each in stats) / seconds)
        self.samples.append(sum(each.num_draft_tokens for each in stats) / sum(each.num_steps for each in stats))
        self.texts = sorted(result.token_ids for result in self._results)

    def _run(self, request: object) -> None:
        llm = ChatPrecedent.from_engine(self._engine, max_tokens=MAX_TOKENS_PER_TURN)
        run_request(llm, request, make_database(seed=0))


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("requests", 8), ("at-once", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=number)
    json_option(parser)
    given = parser.parse_args()
    measurement = Measurement()
    (sides, draft), requests = made(), make_requests("B")[: given.requests]
    for _ in range(1 + given.rounds):
        for side in sides:
            side.serve(requests, given.at_once)
    print(
        f"{given.requests} requests, {given.at_once} at once, {torch.get_num_threads()} threads, {given.rounds} rounds"
    )
    forwards = {count: 1e3 * forward_seconds(draft, count) for count in (1, 2, 4, 8)}
    for count, milliseconds in forwards.items():
        print(f"a forward of the draft model for {count}: {milliseconds:.2f} ms")
    pairs = [step / alone for alone, step in zip(sides[1].rates[1:], sides[2].rates[1:], strict=True)]
    print(f"in step by one by one: median {median(pairs):.2f}, {min(pairs):.2f} to {max(pairs):.2f}")
    plain = median(sides[0].rates[1:])
    for side in sides:
        rate, same = median(side.rates[1:]), sum(map(tuple.__eq__, side.texts, sides[0].texts))
        print(
            f"{side.way:>10}: {rate:6.1f} tokens per second ({rate / plain:.2f}x plain), "
            f"{median(side.samples[1:]):.2f} samples per step, {same} of {len(side.texts)} turns as plain"
        )
    ways = [{"way": side.way, "tokens_per_second": median(side.rates[1:])} for side in sides]
    measurement.write(given.json, {"forward_ms": forwards, "in_step_by_one_by_one": median(pairs), "ways": ways})


def forward_seconds(model: TargetModel, count: int) -> float:
    """One row for each of `count` requests behind 600 tokens: the median of forty."""
    times, slots = [], [model.new_slot() for _ in range(count)]
    for number, slot in enumerate(slots):
        model.prefill(slot, [5 + number] * 600)
    for _ in range(40):
        started = perf_counter()
        model.score([(slot, EMPTY_TREE) for slot in slots])
        times.append(perf_counter() - started)
        for slot in slots:
            model.discard(slot)
    return median(times)


def made() -> tuple[list[Side], TargetModel]:
    """The sides, over one copy of the weights, and the draft model."""
    model, tokenizer = load_target(adapted_target())
    draft = load_draft(draft_folder(), model, tokenizer)
    sides = []
    for way in WAYS:
        results: list[GenerationResult] = []
        drafters = () if way == "plain" else ("draft-model",)
        engine = Engine(
            model,
            tokenizer,
            name="the order desk's",
            draft_model=draft if drafters else None,
            speculation=SpeculationConfig(enabled=bool(drafters), drafters=drafters, write_back=False),
            on_result=lambda _, result, into=results: into.append(result),
        )
        sides.append(Side(way, engine, results))
    return sides, TargetModel(draft)


if __name__ == "__main__":
    main()
