"""Draft models without a cache, with an unrelated one and with a warm one, on the order desk's requests.

    python benchmarks/bench_drafts.py [--draft NAME=FOLDER …] [--requests 8] [--json FILE]

The foreign cache holds the model's answers to unrelated questions, the warm one other customers' requests. Acceptance
is that of samples at temperature 1. Measures the shipped draft models and each `--draft`, as `precedent train-draft`
or `python -m precedent_demo.training.compare` wrote it. Every request is decoded in every way before the next one.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from measuring import options, run
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.target.load.loading import load_target
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
WARMING, HELD_OUT, ANSWER_TOKENS = 16, 4, 96
KEPT = ("tokens", "tokens_per_step", "tokens_per_second")


def measure(given: Namespace) -> dict[str, Any]:
    drafts = {"chain": str(draft_folder()), "block": str(block_folder())}
    drafts |= dict(each.split("=", 1) for each in given.draft)
    model, tokenizer = load_target(str(adapted_target()))
    caches = foreign_cache(model, tokenizer), SpeculationCache.open(None)
    bench = bench_of(model, tokenizer, load_draft(drafts["chain"], model, tokenizer), *caches, WAYS[:1])
    for request in make_requests("A", full=False, seed=0)[:WARMING]:
        bench.warm(request, make_database(seed=0))
    bench.close()
    texts, found = compare.held_out(model, tokenizer, HELD_OUT), dict[str, Any]()
    for name, folder in drafts.items():
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 2**20
        alone = compare.measured(model, name, load_draft(folder, model, tokenizer), texts, 1.0)
        bench = bench_of(model, tokenizer, load_draft(folder, model, tokenizer), *caches, WAYS)
        found[name] = {"mebibytes": size, "alone": alone} | decoded(bench, given.requests)
    return found


def foreign_cache(model: Any, tokenizer: Any) -> SpeculationCache:
    cache = SpeculationCache.open(None)
    cache.warm_up()
    settings = EngineOptions(cache=cache, speculation=SpeculationConfig(drafters=("recall",)))
    engine = Engine(model, tokenizer, settings, name="order desk")
    for prompt in topic_prompts(tokenizer, len(TOPICS), 0).measured:
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS)
        engine.submit(prompt, sampling, query=query_of(tokenizer, prompt), tenant=TENANT).result()
    engine.close()
    return cache


def bench_of(model: Any, tokenizer: Any, draft: Any, foreign: Any, warm: Any, ways: tuple[Way, ...]) -> Bench:
    settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS_PER_TURN, "more_caches": {"foreign": foreign}}
    return Bench(model, tokenizer, "order desk", draft, warm, ways, **settings)


def decoded(bench: Bench, requests: int) -> dict[str, dict[str, float]]:
    for number, request in enumerate(make_requests("B", full=False, seed=0)[:requests]):
        for way in rotated(list(bench.engines), number):
            bench.measure(request, make_database(seed=0), way)
    runs = {way: run.as_dict() for way, run in bench.runs.items()}
    bench.close()
    plain = runs["plain"]["tokens_per_second"]
    return {
        way: {name: run[name] for name in KEPT} | {"speedup": run["tokens_per_second"] / plain}
        for way, run in runs.items()
    }


if __name__ == "__main__":
    asked = options(__doc__, requests=8)
    asked.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER", help="another draft model")
    run(asked, measure)
