"""First token after a restart, with and without a kept prefix.

    python benchmarks/bench_restart.py [--target smollm2-135m-instruct] [--tokens 700] [--rounds 5] [--json FILE]

Each figure is the first request of a process of its own that has loaded its engine; the processes alternate. A first
process keeps the prefix.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, Namespace
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from measuring import options, run
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.text.prompt import render_prompt
from precedent_testing.embedders import HashEmbedder

POLICY = "Rule {n}: an order of class {n} is shipped within {n} days, and refunds of it need the consent of desk {n}. "
QUESTION = "An order of class 7 is late. What do I tell the customer?"


def first_request(folder: Path, target: str, tokens: int) -> dict[str, Any]:
    """Load an engine and ask once, with a system turn of at least so many tokens."""
    kept = {"cache": folder / "cache.db", "embedder": HashEmbedder(), "keep_prefixes": True}
    with closing(Engine.load(target, **kept)) as engine:
        rules, length = "", 0
        while length < tokens:
            rules += POLICY.format(n=rules.count("Rule") + 1)
            messages = [{"role": "system", "content": rules}, {"role": "user", "content": QUESTION}]
            prompt = render_prompt(engine.tokenizer, messages)
            length = engine.kept_prefixes.fixed_part.length(prompt, messages, [])
        result = engine.submit(prompt, SamplingParams(max_tokens=16), prefix_tokens=length).result()
    seconds, reused = result.stats.first_token_seconds, result.cached_prompt_tokens
    sizes = {"prefix": length, "prompt": len(prompt), "reused": reused}
    return sizes | {"seconds": seconds, "answer": result.token_ids}


def measure(given: Namespace) -> dict[str, Any]:
    def in_a_new_process(folder: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--target", given.target, "--tokens", str(given.tokens)]
        ended = subprocess.run([*command, "--in-folder", folder], stdout=subprocess.PIPE, text=True, check=True)
        return dict(json.loads(ended.stdout.splitlines()[-1]))

    runs: dict[str, list[dict[str, Any]]] = {"without_ms": [], "with_ms": []}
    with tempfile.TemporaryDirectory() as kept:
        first = in_a_new_process(kept)
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as empty:
                for way, folder in (("without_ms", empty), ("with_ms", kept)):
                    runs[way].append(in_a_new_process(folder))
                    assert runs[way][-1]["reused"] == (first["prefix"] if way == "with_ms" else 0)
    same = sum(one["answer"] == first["answer"] for each in runs.values() for one in each)
    sizes = {"prompt_tokens": first["prompt"], "kept_tokens": first["prefix"]}
    times = {way: median(one["seconds"] for one in each) * 1e3 for way, each in runs.items()}
    return sizes | times | {"same_answers": [same, 2 * given.rounds]}


if __name__ == "__main__":
    asked = options(__doc__, target="smollm2-135m-instruct", tokens=700, rounds=5)
    asked.add_argument("--in-folder", type=Path, help=SUPPRESS)
    own = asked.parse_args()
    if own.in_folder:
        print(json.dumps(first_request(own.in_folder, own.target, own.tokens)))
    else:
        run(asked, measure)
