"""The first answer after a restart, with and without a kept prefix: seconds from `submit` to the first token.

    python tests/benchmarks/bench_restart.py [--target smollm2-135m-instruct] [--tokens 700] [--rounds 5] [--json FILE]

Every figure is the first request of a process of its own, which has loaded its engine. The processes take turns, so
that other work on the machine disturbs both alike. A first process keeps the prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from measurement import Measurement, json_option

from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.testing.embedders import HashEmbedder
from precedent.text.prompt import render_prompt

POLICY = "Rule {n}: an order of class {n} is shipped within {n} days, and refunds of it need the consent of desk {n}. "
QUESTION = "An order of class 7 is late. What do I tell the customer?"


def prompt_of(engine: Engine, tokens: int) -> tuple[list[int], int]:
    """A prompt whose system turn makes at least so many tokens, and how many of them are its fixed beginning."""
    rules, length, fixed = "", 0, engine.kept_prefixes.fixed_part
    for number in range(1, tokens):
        rules += POLICY.format(n=number)
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": QUESTION}]
        prompt = render_prompt(engine.tokenizer, messages)
        length = fixed.length(prompt, messages, [])
        if length >= tokens:
            break
    return prompt, length


def first_request(folder: str, target: str, tokens: int) -> dict[str, Any]:
    """Load an engine and ask once."""
    options = {"cache": Path(folder) / "cache.db", "embedder": HashEmbedder(), "keep_prefixes": True}
    with closing(Engine.load(target, **options)) as engine:
        prompt, length = prompt_of(engine, tokens)
        result = engine.submit(prompt, SamplingParams(max_tokens=16), prefix_tokens=length).result()
    return {
        "prefix": length,
        "prompt": len(prompt),
        "reused": result.cached_prompt_tokens,
        "seconds": result.stats.first_token_seconds,
        "answer": result.token_ids,
    }


def in_a_new_process(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """`first_request` there."""
    given = [*("--target", options.target), *("--tokens", str(options.tokens)), *("--in-folder", folder)]
    ended = subprocess.run([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    """Compare, or be one of the processes that are compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-folder", help=argparse.SUPPRESS)
    json_option(parser)
    options = parser.parse_args()
    if options.in_folder:
        print(json.dumps(first_request(options.in_folder, options.target, options.tokens)))
        return
    measurement = Measurement()
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    equal = 0
    with tempfile.TemporaryDirectory() as kept:
        kept_at_first = in_a_new_process(kept, options)
        print(f"a prompt of {kept_at_first['prompt']} tokens, {kept_at_first['prefix']} of them kept")
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as empty:
                for name, folder in (("without", empty), ("with", kept)):
                    found = in_a_new_process(folder, options)
                    assert found["reused"] == (found["prefix"] if name == "with" else 0)
                    equal += found["answer"] == kept_at_first["answer"]
                    seconds[name].append(found["seconds"])
                    print(f"{name:8} {found['seconds'] * 1e3:8.0f} ms   load {os.getloadavg()[0]:.1f}", flush=True)
    without, with_prefix = (median(seconds[name]) for name in ("without", "with"))
    print(f"{equal} of {2 * options.rounds} answers are the same, token for token")
    print(f"median   {without * 1e3:.0f} ms without, {with_prefix * 1e3:.0f} ms with: {with_prefix / without:.3f}")
    times = {"without_ms": without * 1e3, "with_ms": with_prefix * 1e3}
    sizes = {"prompt_tokens": kept_at_first["prompt"], "kept_tokens": kept_at_first["prefix"]}
    measurement.write(options.json, {**sizes, **times, "same_answers": [equal, 2 * options.rounds]})


if __name__ == "__main__":
    main()
