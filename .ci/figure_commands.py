"""The commands that measure what `docs/figures` holds, by the name of their files."""

from __future__ import annotations

from dataclasses import dataclass

TRACES = "TRACES"
"""Stands for the folder with recorded runs in a command's arguments."""


@dataclass(frozen=True)
class Command:
    """One command, without `--json FILE`, which is added.

    - `words`: `precedent …`, `python -m …`, or a program of `tests/benchmarks` with its arguments.
    - `minutes`: about how long it takes on two quiet cores.
    - `environment`: the folder whose Python runs it, and the `make` command that sets it up.
    - `package`: what has to be installed there beside.
    - `by_machine`: whether each class of machines has a file of its own; otherwise the last run counts.
    - `limits`: kernels of lesser processors with which it is measured as well.
    """

    words: str
    minutes: float
    environment: tuple[str, str] = (".venv", "make check")
    package: str = ""
    by_machine: bool = False
    limits: tuple[str, ...] = ()

    @property
    def needs_traces(self) -> bool:
        """Whether recorded runs are measured."""
        return TRACES in self.words


BENCH = "tests/benchmarks"
VLLM, RAY, LLAMA = ((f".venv-{name}", f"make test-{name}") for name in ("vllm", "ray", "llama-cpp"))
RETAIL, AIRLINE = f"{TRACES}/tau_retail.jsonl.gz", f"{TRACES}/tau_airline.jsonl.gz"
POOLS = "--warm 24 --measured 12 --modes plain ngram suffix precedent free-width"
MISLED = f"{BENCH}/bench_vllm.py --traces {RETAIL} --warm 4 --measured 24 --modes"
CUT = "--truncate --max-prompt-tokens 1000"

COMMANDS = {
    "demo": Command("precedent demo --full --fresh", 12, by_machine=True, limits=("avx2",)),
    "untrained": Command("precedent demo --target smollm2-135m-instruct --requests 16 --fresh", 10),
    "run-ahead": Command("precedent demo --tool-latency 0.4 --fresh", 7),
    "rows": Command(f"{BENCH}/bench_rows.py", 2, by_machine=True, limits=("avx512", "avx2")),
    "busy": Command(f"{BENCH}/bench_busy.py", 5),
    "adversarial": Command(
        "precedent bench --topics --modes plain,adversarial,ours-cold --prompts 16 --warm 6", 3, by_machine=True
    ),
    "software": Command(
        f"precedent bench --traces {RETAIL} --prompts 12 --warm 24 {CUT} --modes plain,generate,prompt-lookup,ours",
        8,
    ),
    "llama-cpp": Command(f"{BENCH}/bench_llama_cpp.py --traces {RETAIL} --warm 24", 5, environment=LLAMA),
    "replay": Command(f"{BENCH}/bench_replay.sh {TRACES} --limit 300", 60),
    "ablation": Command(
        f"precedent replay {AIRLINE} --pool same-task --ablate all --budget 32 --limit 150 --calibration", 10
    ),
    "actions": Command(f"precedent replay --actions {AIRLINE} --pool other-tasks", 3),
    "capacity": Command(f"{BENCH}/bench_capacity.py", 1),
    "steps": Command(f"{BENCH}/profile_step.py --tokens 64", 1),
    "server": Command(f"{BENCH}/bench_server.py --rounds 20", 5),
    "server-memory": Command(f"{BENCH}/bench_server.py --rounds 1 --minutes 20", 23),
    "start": Command(f"{BENCH}/bench_start.py", 3),
    "restart": Command(f"{BENCH}/bench_restart.py", 2),
    "concurrency": Command("precedent bench --concurrency 4", 3),
    "service": Command(f"{BENCH}/bench_service.py --rows 1 4 16 32 --drafters recall prompt template prediction", 6),
    "ray": Command(f"{BENCH}/bench_ray.py --rounds 16", 25, environment=RAY),
    "store-load": Command(
        f"{BENCH}/bench_store_load.py {AIRLINE} --clients 1 2 4 16 --warm 100000", 8, environment=RAY
    ),
    "store": Command(f"{BENCH}/bench_store.py 1000 10000 100000 1000000", 15),
    "vllm-recorded": Command(
        f"{BENCH}/bench_vllm.py --traces {RETAIL} --warm 48 --measured 24 --modes plain ngram suffix precedent "
        "free-width empty",
        30,
        environment=VLLM,
        package="arctic-inference",
    ),
    "vllm-retail-other": Command(
        f"{BENCH}/bench_vllm.py --traces {RETAIL} --pool other-task {POOLS}", 15, VLLM, package="arctic-inference"
    ),
    "vllm-airline": Command(f"{BENCH}/bench_vllm.py --traces {AIRLINE} {POOLS}", 15, VLLM, package="arctic-inference"),
    "vllm-airline-other": Command(
        f"{BENCH}/bench_vllm.py --traces {AIRLINE} --pool other-task {POOLS}", 15, VLLM, package="arctic-inference"
    ),
    "vllm-adversarial": Command(f"{MISLED} nothing adversarial", 10, environment=VLLM),
    "vllm-misled": Command(f"{MISLED} plain nothing misled", 15, environment=VLLM),
    "vllm-desk": Command(
        f"{BENCH}/bench_vllm.py --warm 8 --measured 4 --modes nothing ngram precedent", 8, environment=VLLM
    ),
    "bitwise": Command(f"{BENCH}/bench_bitwise.py --texts 200 --tokens 40", 15, by_machine=True),
    "rounding": Command(f"{BENCH}/bench_rounding.py --prompts 8", 4),
    "verify": Command(f"{BENCH}/bench_verify.py --draft noisy:1 --limit 1 --no-cost", 5),
    "grammar": Command(f"{BENCH}/bench_grammar.py", 1),
    "hybrid": Command(f"{BENCH}/bench_hybrid.py", 6),
    "drafts": Command(
        "python -m precedent_demo.training.compare --out build/drafts --minutes 5 exit-4 chain eagle passes mask "
        "fusion griffin block block-filled block-none",
        75,
    ),
    "drafts-beside": Command(f"{BENCH}/bench_drafts.py --draft exit=build/drafts/exit-4 --requests 8", 15),
    "lossy": Command(f"{BENCH}/bench_lossy.py --requests 40 --sampled 20 --rows 8", 17),
    "seq2seq": Command(f"{BENCH}/bench_seq2seq.py --steps 1500 --notes 200", 12),
}
