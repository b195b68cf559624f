"""How often do greedy texts differ with and without speculation, after 64 and after 500 tokens?

    python tests/benchmarks/bench_rounding.py [--dtype float32] [--prompts 10] [--json FILE]

The drafts come from the text itself (prompt lookup) and from answers to the same prompts with another ending, so the
candidate trees are as wide as in use.
"""

from __future__ import annotations

import argparse

from measurement import Measurement, json_option

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.target import common_prefix
from precedent.text.prompt import render_prompt

SUBJECTS = (
    "the return of a blue lamp",
    "a late parcel",
    "how to brew coffee",
    "three rivers of Europe",
    "a library opening",
    "the rules of chess",
    "a bicycle repair",
    "planting tomatoes",
    "a museum visit",
    "writing a cover letter",
    "the water cycle",
    "a train journey",
)
LENGTHS = (64, 500)


def main() -> None:
    """Compare plain and speculated greedy decoding, and write the counts as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--target", default="smollm2-135m-instruct")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--prompts", type=int, default=len(SUBJECTS))
    json_option(options)
    chosen = options.parse_args()
    measurement = Measurement()
    engine = Engine.load(chosen.target, dtype=chosen.dtype, cache=SpeculationCache.open(None))
    plain = SpeculationConfig(enabled=False)
    agreed = []
    for subject in SUBJECTS[: chosen.prompts]:
        prompt = render_prompt(engine.tokenizer, [{"role": "user", "content": f"Write a long text about {subject}."}])
        other = render_prompt(engine.tokenizer, [{"role": "user", "content": f"Write two lines about {subject}."}])
        engine.submit(other, SamplingParams(max_tokens=64), query=subject).result()
        reference = engine.submit(prompt, SamplingParams(max_tokens=LENGTHS[-1]), speculation=plain).result()
        speculated = engine.submit(prompt, SamplingParams(max_tokens=LENGTHS[-1]), query=subject).result()
        same = common_prefix(reference.token_ids, speculated.token_ids)
        agreed.append((same, len(reference.token_ids)))
        rate = speculated.stats.tokens_per_step
        print(f"{subject}: {same} of {len(reference.token_ids)} tokens equal, {rate:.2f} tokens per step", flush=True)
    identical = {length: sum(equal >= min(length, total) for equal, total in agreed) for length in LENGTHS}
    for length, same in identical.items():
        print(f"{chosen.dtype}: {same} of {len(agreed)} texts identical after {length} tokens")
    measurement.write(chosen.json, {"dtype": chosen.dtype, "texts": len(agreed), "identical_after_tokens": identical})


if __name__ == "__main__":
    main()
