"""Tokens per second of our engine, plain and warm, against llama.cpp on the weights of the same GGUF file.

    pip install llama-cpp-python
    python tests/benchmarks/bench_llama_cpp.py [--gguf FILE] [--traces FILE] [--prompts 6] [--warm 12] [--threads 2]
                                                [--json FILE]

Greedy, decoding only (what comes after the first token), the contestants interleaved. llama.cpp computes in the file's
own quantisation, ours in bfloat16: answers may differ, rates can be compared. "warm" is our engine with the answers to
other prompts of the same workflows in its cache; with `--traces` these are recorded turns, cut to --max-prompt-tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from measurement import Measurement, json_option

from precedent.target.load.packaged import DEMO_TARGET, _packaged_gguf
from precedent_replay.bench_lineup import Lineup
from precedent_replay.bench_modes import Contestant, Timing
from precedent_replay.bench_prompts import PromptSet, order_desk_prompts, trace_prompts

CONTEXT = 4096


class LlamaContestant:
    """llama.cpp behind its Python binding."""

    def __init__(self, gguf: Path, threads: int, max_tokens: int) -> None:
        from llama_cpp import Llama

        self._llama: Any = Llama(str(gguf), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)
        self._max_tokens = max_tokens

    def __call__(self, prompt_ids: Sequence[int]) -> Timing:
        """Greedy answer to a prompt, by its token ids."""
        started, token_ids, arrivals = perf_counter(), [], []
        end = self._llama.token_eos()
        for token in self._llama.generate(list(prompt_ids), temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            token_ids.append(int(token))
            arrivals.append((perf_counter() - started, 1))
            if token == end or len(token_ids) == self._max_tokens:
                break
        return Timing(tuple(token_ids), tuple(arrivals), arrivals[-1][0], len(token_ids) - 1)

    def close(self) -> None:
        """Free the model while the interpreter stands: left to its end, the process has been aborted."""
        self._llama.close()


def main() -> None:
    """Compare, if llama-cpp-python is there."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gguf", type=Path, help="default: the packaged demo model's")
    options.add_argument("--traces", type=Path, help="OpenAI-format chat traces; default: the order desk")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--warm", type=int, default=12, help="other prompts whose answers fill the cache")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--max-prompt-tokens", type=int, default=1000)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    json_option(options)
    chosen = options.parse_args()
    measurement = Measurement()
    try:
        import llama_cpp  # noqa: F401 -- only whether it is there
    except ImportError:
        print("skipped: llama-cpp-python is not installed (pip install llama-cpp-python; it compiles for minutes)")
        return
    torch.set_num_threads(chosen.threads)
    lineup = Lineup(DEMO_TARGET, None, None, None, chosen.max_tokens)
    llama = LlamaContestant(chosen.gguf or _packaged_gguf()[0], chosen.threads, chosen.max_tokens)
    plain, warm = lineup.ours(enabled=False), lineup.ours(lineup.cache)
    asked = prompts(lineup, chosen)
    fill(lineup, asked)
    contestants: dict[str, Contestant] = {"llama.cpp, plain": llama, "ours, plain": plain, "ours, warm": warm}
    try:
        measurement.write(chosen.json, compare(contestants, asked))
    finally:
        llama.close()
        lineup.close()


def prompts(lineup: Lineup, chosen: argparse.Namespace) -> PromptSet:
    """What is asked, and what warms the cache before."""
    if chosen.traces is None:
        return order_desk_prompts(lineup.tokenizer, chosen.prompts, chosen.warm)
    longest = chosen.max_prompt_tokens
    return trace_prompts(chosen.traces, lineup.tokenizer, chosen.prompts, chosen.warm, longest, truncate=True)


def fill(lineup: Lineup, asked: PromptSet) -> None:
    """Answer the warming prompts; their answers are what "warm" drafts from."""
    filler = lineup.ours(lineup.cache, write_back=True)
    for prompt in asked.warming:
        filler(prompt)
    filler.engine.close()


def compare(contestants: Mapping[str, Contestant], asked: PromptSet) -> dict[str, dict[str, float | None]]:
    """Let everybody answer every prompt; the median rates, printed."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for prompt in asked.measured:
        for name, contestant in contestants.items():
            timing = contestant(prompt)
            if timing.decode_tokens > 0:
                rates[name].append(timing.decode_tokens / timing.decode_seconds)
    for name, found in rates.items():
        rate = f"{median(found):.1f} tokens per second (median of {len(found)})" if found else "nothing to measure"
        print(f"{name}: {rate}")
    return {
        name: {"tokens_per_second": median(found) if found else None, "prompts": len(found)}
        for name, found in rates.items()
    }


if __name__ == "__main__":
    main()
