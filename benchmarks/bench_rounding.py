"""Greedy texts with and without speculation: how many are equal after 64 and after 500 tokens.

    python benchmarks/bench_rounding.py [--dtype float32] [--prompts 10] [--json FILE]

Drafts come from the text itself and from answers to similar prompts, so that trees are as wide as in use.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from measuring import options, run
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.target import common_prefix
from precedent.text.prompt import render_prompt

SUBJECTS = (
    "the return of a blue lamp", "a late parcel", "how to brew coffee", "three rivers of Europe", "a library opening",
    "the rules of chess", "a bicycle repair", "planting tomatoes", "a museum visit", "writing a cover letter",
    "the water cycle", "a train journey",
)  # fmt: skip
LENGTHS = (64, 500)


def measure(given: Namespace) -> dict[str, Any]:
    engine, agreed = Engine.load(given.target, dtype=given.dtype, cache=SpeculationCache.open(None)), []
    plain, long = SpeculationConfig(enabled=False), SamplingParams(max_tokens=LENGTHS[-1])
    for subject in SUBJECTS[: given.prompts]:
        prompt, other = (
            render_prompt(engine.tokenizer, [{"role": "user", "content": f"Write {length} about {subject}."}])
            for length in ("a long text", "two lines")
        )
        engine.submit(other, SamplingParams(max_tokens=64), query=subject).result()
        expected = engine.submit(prompt, long, speculation=plain).result().token_ids
        found = engine.submit(prompt, long, query=subject).result().token_ids
        agreed.append((common_prefix(expected, found), len(expected)))
        print(f"{subject}: {agreed[-1][0]} of {agreed[-1][1]} tokens equal", flush=True)
    identical = {length: sum(equal >= min(length, total) for equal, total in agreed) for length in LENGTHS}
    return {"dtype": given.dtype, "texts": len(agreed), "identical_after_tokens": identical}


if __name__ == "__main__":
    run(options(__doc__, target="smollm2-135m-instruct", dtype="bfloat16", prompts=len(SUBJECTS)), measure)
