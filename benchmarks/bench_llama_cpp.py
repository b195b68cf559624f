"""Our engine, plain and warm, against llama.cpp with the weights of the same GGUF file: tokens per second.

    .venv-llama-cpp/bin/python benchmarks/bench_llama_cpp.py [--traces FILE] [--gguf FILE] [--json FILE]

Greedy, decoding only (after the first token), alternating. llama.cpp computes in the file's own quantisation, ours in
bfloat16, so answers may differ; rates can be compared. "warm" is our engine with answers to other prompts of the same
workflows in its cache; with `--traces` these are recorded turns, cut to `--max-prompt-tokens`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from measuring import options, run
from precedent.engine.options import EngineOptions
from precedent.target.load.source import DEMO_TARGET, packaged_file
from precedent_replay.bench_lineup import Lineup, Timing
from precedent_replay.bench_prompts import order_desk_prompts, trace_prompts


class LlamaContestant:
    """llama.cpp through its Python binding."""

    def __init__(self, gguf: Path, threads: int, max_tokens: int) -> None:
        from llama_cpp import Llama

        self._llama: Any = Llama(str(gguf), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
        self._max_tokens = max_tokens

    def __call__(self, prompt_ids: Sequence[int]) -> Timing:
        started, token_ids, arrivals = perf_counter(), [], []
        for token in self._llama.generate(list(prompt_ids), temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            token_ids.append(int(token))
            arrivals.append((perf_counter() - started, 1))
            if token == self._llama.token_eos() or len(token_ids) == self._max_tokens:
                break
        return Timing(tuple(token_ids), tuple(arrivals), arrivals[-1][0], len(token_ids) - 1)

    def close(self) -> None:
        """Free the model before the interpreter ends: left to it, the process has been aborted."""
        self._llama.close()


def measure(given: Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    lineup = Lineup(DEMO_TARGET, EngineOptions(), given.max_tokens)
    llama = LlamaContestant(given.gguf or packaged_file(), given.threads, given.max_tokens)
    ways = {
        "llama.cpp, plain": llama,
        "ours, plain": lineup.ours(enabled=False),
        "ours, warm": lineup.ours(lineup.cache),
    }
    sizes, longest = (given.prompts, given.warm), given.max_prompt_tokens
    if given.traces is None:
        prompts = order_desk_prompts(lineup.tokenizer, *sizes)
    else:
        prompts = trace_prompts(given.traces, lineup.tokenizer, *sizes, longest, truncate=True)
    filler, rates = lineup.ours(lineup.cache, write_back=True), dict[str, list[float]]()
    for prompt in prompts.warming:
        filler(prompt)
    filler.engine.close()
    try:
        for prompt in prompts.measured:
            for way, answer in ways.items():
                timing = answer(prompt)
                rate = [timing.decode_tokens / timing.decode_seconds] if timing.decode_tokens > 0 else []
                rates.setdefault(way, []).extend(rate)
    finally:
        llama.close()
        lineup.close()
    return {way: {"tokens_per_second": median(found), "prompts": len(found)} for way, found in rates.items() if found}


if __name__ == "__main__":
    sizes = {"prompts": 6, "warm": 12, "max_tokens": 64, "max_prompt_tokens": 1000}
    run(options(__doc__, gguf=Path, traces=Path, threads=torch.get_num_threads(), **sizes), measure)
