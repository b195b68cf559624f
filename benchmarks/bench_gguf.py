"""Quantised files beside llama.cpp on the same files, alternating: steps by number of rows, prompts, recorded turns.

    .venv-llama-cpp/bin/python benchmarks/bench_gguf.py [--files smollm2 1b 3b] [--traces FILE] [--json FILE]
    PRECEDENT_CPU_KERNELS=avx2 …    # with an environment whose llama.cpp is built for AVX2 (docs/how-to/model-files.md)

`1b` and `3b` are files of Llama 3.2's shapes with random weights in the mix of types of a Q4_K_M file, made at first
use in `build/gguf`; any other name is the path of a file. With `--traces`, recorded turns are replayed at the measured
cost of our steps (`precedent replay`, pool `online`), and compared with llama.cpp's plain steps; with `--answers` also
answered on the packaged file by both (greedy; decoding alone; "warm": with answers of other runs in the cache).
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from measuring import ROOT, options, run
from precedent.cache import SentenceTransformerEmbedder
from precedent.cache.embedder import default_model
from precedent.engine.options import EngineOptions
from precedent.target import TargetModel
from precedent.target.load.loading import load_target, load_tokenizer
from precedent.target.load.source import DEMO_TARGET, packaged_file
from precedent_replay.bench_lineup import Lineup
from precedent_replay.bench_prompts import trace_prompts
from precedent_replay.run import replay
from precedent_replay.settings import MEASURED, MeasuredSteps, Settings
from precedent_replay.step_times import StepTimer
from precedent_testing.tiny_gguf import write_gguf

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32},
    "3b": {"num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 24},
}
COMMON: dict[str, Any] = {
    "intermediate_size": 8192, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
"""What both of Llama 3.2's shapes have."""

ROUNDS, IN_A_ROW, PREFILLS = 8, 3, 5

FIRST_TOKEN = """
import sys
from time import perf_counter
import precedent_cpu.support
from precedent.target import TargetModel
from precedent.target.load.loading import load_target

begun = perf_counter()
target = TargetModel(load_target(sys.argv[1])[0])
slot = target.new_slot()
target.prefill(slot, [1, 2, 3])
target.plain_step(slot)
seconds = perf_counter() - begun
print(seconds, next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
"""Prints the seconds from Python's imports to the first token, and the most kibibytes of memory (Linux)."""


def opened(file: Path, threads: int, context: int) -> Any:
    """A file in llama.cpp."""
    from llama_cpp import Llama

    return Llama(str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)


class LlamaTimer:
    """llama.cpp with the methods of `StepTimer`."""

    def __init__(self, file: Path, context: int, threads: int) -> None:
        self.context, self.llama = context, opened(file, threads, context + 512)
        self._choose = np.random.default_rng(0)
        self._decode(context, 0)

    def _decode(self, count: int, past: int, *, all_logits: bool = False) -> None:
        for start in range(past, past + count, self.llama.n_batch):
            ids = self._choose.integers(0, 40_000, min(self.llama.n_batch, past + count - start)).tolist()
            self.llama._batch.set_batch(batch=ids, n_past=start, logits_all=all_logits)
            self.llama._ctx.decode(self.llama._batch)

    def step(self, rows: int) -> float:
        """Milliseconds of a step whose rows follow each other, with the logits of all."""
        started = perf_counter()
        self._decode(rows, self.context, all_logits=True)
        spent = perf_counter() - started
        self.llama._ctx.kv_cache_seq_rm(0, self.context, -1)
        return spent * 1e3

    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second; the context is computed again afterwards."""
        self.llama._ctx.kv_cache_clear()
        started = perf_counter()
        self._decode(tokens, 0)
        spent = perf_counter() - started
        self.llama._ctx.kv_cache_clear()
        self._decode(self.context, 0)
        return tokens / spent


def measure(given: Namespace) -> dict[str, Any]:
    from llama_cpp import llama_print_system_info

    torch.set_num_threads(given.threads)
    figures: dict[str, Any] = {"llama.cpp": llama_print_system_info().decode().strip(" |\n")}
    for name in given.files:
        file = packaged_file() if name == "smollm2" else shaped(name) if name in SHAPES else Path(name)
        found = compared(file, given.rows, given.context, given.threads)
        if given.traces is not None and name != "smollm2":
            found["turns"] = turns(found, given.traces, given.limit)
        figures[Path(name).stem] = found
    if given.traces is not None and given.answers:
        figures["answers"] = answers(given.traces, given.answers, given.threads)
    return figures


def compared(file: Path, rows: Sequence[int], context: int, threads: int) -> dict[str, Any]:
    """Steps and prompts of both, in turns: several in a row, for decoding does nothing else."""
    timers = {"ours": StepTimer(TargetModel(load_target(file)[0]), context)}
    timers |= {"llama.cpp": LlamaTimer(file, context, threads)}
    steps: dict[tuple[str, int], list[float]] = {(way, count): [] for way in timers for count in rows}
    prompts: dict[str, list[float]] = {way: [] for way in timers}
    with closing(timers["llama.cpp"].llama):  # left to the end of the interpreter, the process has been aborted
        for way, count in ((way, count) for _ in range(ROUNDS) for count in rows for way in timers):
            sleep(0.02)  # threads of the other way still spin for some milliseconds
            times = [timers[way].step(count) for _ in range(1 + IN_A_ROW)]
            steps[way, count] += times[1:]
        for way in (way for _ in range(1 + PREFILLS) for way in timers):
            prompts[way].append(timers[way].prefill(512))
    first = subprocess.run([sys.executable, "-c", FIRST_TOKEN, file], capture_output=True, text=True, check=True)
    waited, peak = map(float, first.stdout.split())  # the kernels are compiled by now
    found = [{"rows": count, **versus({way: median(steps[way, count]) for way in timers})} for count in rows]
    for each in found:
        each["rows_against_one"] = each["ours"] / found[0]["ours"]
    prompt = versus({way: 1 / median(rates[1:]) for way, rates in prompts.items()})
    sizes = {"seconds": waited, "peak_megabytes": peak * 1.024e-3, "file_megabytes": file.stat().st_size * 1e-6}
    return {"rows": found, "prompt": prompt, "first_token": sizes}


def versus(times: dict[str, float]) -> dict[str, float]:
    return times | {"times": times["llama.cpp"] / times["ours"]}


def turns(steps: dict[str, Any], traces: Path, limit: int) -> dict[str, Any]:
    """Tokens per second of recorded turns at the measured cost of our steps, and of llama.cpp's plain steps."""
    ours, plain = ({each["rows"]: each[way] for each in steps["rows"]} for way in ("ours", "llama.cpp"))
    settings = Settings(limit=limit, curves=(MEASURED,), measured=MeasuredSteps("ours", ours))
    tokenizer, embedder = load_tokenizer(packaged_file()), SentenceTransformerEmbedder(default_model())
    found = replay([traces], (), tokenizer, embedder, settings)
    row = next(row for row in found.as_dict()["drafters"] if row["main"])
    rates = {"ours": row["speed_on_this_machine"] * 1e3 / ours[1], "llama.cpp": 1e3 / plain[1]}
    return rates | {"times": rates["ours"] / rates["llama.cpp"], "tokens_per_step": row["tokens_per_step"]}


def answers(traces: Path, count: int, threads: int) -> dict[str, float]:
    """Tokens per second of decoding on the packaged file: llama.cpp, and our engine without and with a warm cache."""
    lineup = Lineup(DEMO_TARGET, EngineOptions(), 64)
    prompts = trace_prompts(traces, lineup.tokenizer, count, 4 * count, 1000, truncate=True)
    llama = opened(packaged_file(), threads, 4096)
    with closing(llama), closing(lineup):
        filler, plain, warm = (
            lineup.ours(lineup.cache, write_back=True),
            lineup.ours(enabled=False),
            lineup.ours(lineup.cache),
        )
        for prompt in prompts.warming:
            filler(prompt)
        rates: dict[str, list[float]] = {"llama.cpp": [], "ours, plain": [], "ours, warm": []}
        for prompt in prompts.measured:
            arrivals = list[float]()
            for token in llama.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
                arrivals.append(perf_counter())
                if token == llama.token_eos() or len(arrivals) == 64:
                    break
            rates["llama.cpp"].append((len(arrivals) - 1) / max(arrivals[-1] - arrivals[0], 1e-9))
            for way, contestant in (("ours, plain", plain), ("ours, warm", warm)):
                timing = contestant(prompt)
                rates[way].append(timing.decode_tokens / max(timing.decode_seconds, 1e-9))
    found = {way: median(rate for rate in rates[way] if rate) for way in rates}
    return found | {"times": found["ours, warm"] / found["llama.cpp"]}


def shaped(name: str) -> Path:
    """The file of one of `SHAPES`, with the packaged file's tokenizer and the types that llama.cpp gives to Q4_K_M."""
    file = ROOT / "build" / "gguf" / f"{name}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        config, kinds = LlamaConfig(**SHAPES[name], **COMMON), {"token_embd": "Q6_K"}
        layers = config.num_hidden_layers
        for layer in range(layers):
            if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
                kinds |= {f"blk.{layer}.attn_v": "Q6_K", f"blk.{layer}.ffn_down": "Q6_K"}
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        part = file.with_suffix(".part")
        write_gguf(part, model, load_tokenizer(packaged_file()), kind=kinds | {"": "Q4_K"}).rename(file)
    return file


if __name__ == "__main__":
    given = {"files": ["smollm2", "1b", "3b"], "rows": [1, 2, 4, 8, 16, 32], "context": 640, "limit": 300, "answers": 0}
    run(options(__doc__, **given, traces=Path, threads=torch.get_num_threads()), measure)
