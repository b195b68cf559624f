"""Draft models without a cache, beside a foreign one and beside a warm one, on the order desk's requests.

    python tests/benchmarks/bench_drafts.py [--draft NAME=FOLDER …] [--requests 8] [--json FILE]

The foreign cache holds the model's answers to questions that have nothing to do with the desk; the warm one other
customers' requests. Acceptance is that of samples at temperature 1. The shipped draft models are measured, and each
`--draft` besides, as `precedent train-draft` or `python -m precedent_demo.training.compare` wrote it. Every request is
decoded in every way before the next one, for one draft model after another; the cache alone is measured beside each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measurement import Measurement, json_option

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.target.load.loading import load_draft, load_target
from precedent_demo import (
    MAX_TOKENS_PER_TURN,
    adapted_target,
    block_folder,
    draft_folder,
    make_database,
    make_requests,
)
from precedent_demo.demo_runs import MEMORY, TENANT, Bench, Way, rotated
from precedent_demo.training import compare
from precedent_replay.bench_modes import query_of
from precedent_replay.bench_prompts import TOPICS, topic_prompts

BOTH = (*MEMORY, "draft-model")
WAYS = (
    Way("plain"),
    Way("cache, foreign", MEMORY, "foreign"),
    Way("cache, warm", MEMORY, "A"),
    Way("draft, empty", ("draft-model",)),
    Way("draft, foreign", BOTH, "foreign"),
    Way("draft, warm", BOTH, "A"),
)
WARMING = 16
ANSWER_TOKENS = 96
HELD_OUT = 4
"""Customers whose turns acceptance is measured on."""


def main() -> None:
    """Print a line for each draft model and way."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER", help="another draft model")
    options.add_argument("--requests", type=int, default=8)
    json_option(options)
    given = options.parse_args()
    measurement = Measurement()
    drafts = {"chain": str(draft_folder()), "block": str(block_folder())}
    drafts |= dict(each.split("=", 1) for each in given.draft)
    loaded = load_target(str(adapted_target()))
    caches = foreign_cache(*loaded), SpeculationCache.open(None)
    warm(*loaded, *caches)
    texts = compare.held_out(*loaded, HELD_OUT)
    found: dict[str, Any] = {}
    for name, folder in drafts.items():
        found[name] = {"mebibytes": mebibytes(Path(folder))} | accepted(name, folder, *loaded, texts)
        found[name] |= measured(name, folder, *loaded, *caches, given.requests)
    measurement.write(given.json, found)


def foreign_cache(model: Any, tokenizer: Any) -> SpeculationCache:
    """A cache with the model's answers to questions on other topics."""
    cache = SpeculationCache.open(None)
    cache.warm_up()
    options = EngineOptions(cache=cache, speculation=SpeculationConfig(drafters=("recall",)))
    engine = Engine(model, tokenizer, options, name="order desk")
    for prompt in topic_prompts(tokenizer, len(TOPICS), 0).measured:
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS)
        engine.submit(prompt, sampling, query=query_of(tokenizer, prompt), tenant=TENANT).result()
    engine.close()
    return cache


def bench_of(
    model: Any, tokenizer: Any, draft: Any, foreign: SpeculationCache, warm: SpeculationCache, ways: tuple[Way, ...]
) -> Bench:
    """Engines over the same weights and caches."""
    return Bench(
        model, tokenizer, "order desk", draft, warm, ways,
        temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN, more_caches={"foreign": foreign},
    )  # fmt: skip


def warm(model: Any, tokenizer: Any, foreign: SpeculationCache, cache: SpeculationCache) -> None:
    """Fill the warm cache with other customers' requests."""
    draft = load_draft(str(draft_folder()), model, tokenizer)
    bench, desk = bench_of(model, tokenizer, draft, foreign, cache, WAYS[:1]), make_database(seed=0)
    for request in make_requests("A", full=False, seed=0)[:WARMING]:
        bench.warm(request, desk)
    bench.close()


def mebibytes(folder: Path) -> float:
    """The size of a draft's weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20


def accepted(name: str, folder: str, model: Any, tokenizer: Any, texts: Sequence[Any]) -> dict[str, Any]:
    """What share of its samples is accepted, and what one costs."""
    draft = load_draft(folder, model, tokenizer)
    return {"alone": compare.measured(model, name, draft, texts, 1.0)}


def measured(
    name: str,
    folder: str,
    model: Any,
    tokenizer: Any,
    foreign: SpeculationCache,
    cache: SpeculationCache,
    requests: int,
) -> dict[str, dict[str, float]]:
    """Every way's tokens per step, and its tokens per second against plain decoding's."""
    draft = load_draft(folder, model, tokenizer)
    bench, desk = bench_of(model, tokenizer, draft, foreign, cache, WAYS), make_database(seed=0)
    for number, request in enumerate(make_requests("B", full=False, seed=0)[:requests]):
        for way in rotated(list(bench.engines), number):
            bench.measure(request, desk, way)
    runs = {way: run.as_dict() for way, run in bench.runs.items()}
    bench.close()
    plain = runs["plain"]["tokens_per_second"]
    for way, run in runs.items():
        print(
            f"{name:10} {way:15} {run['tokens_per_step']:5.2f} tokens per step "
            f"{run['tokens_per_second'] / plain:5.2f}x plain's {plain:.1f} tok/s",
            flush=True,
        )
    return {
        way: {
            "tokens": run["tokens"],
            "tokens_per_step": run["tokens_per_step"],
            "tokens_per_second": run["tokens_per_second"],
            "speedup": run["tokens_per_second"] / plain,
        }
        for way, run in runs.items()
    }


if __name__ == "__main__":
    main()
