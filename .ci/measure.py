"""Measures what the documentation shows, one command after the other, and writes `docs/figures` and the tables.

    python .ci/measure.py [NAME …] [--busy] [--traces FOLDER]

NAME is a key of `COMMANDS`; without any, all are measured. Commands whose environment or traces are missing are skipped
and named. The output of a command is kept in `build/figures`. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

# it is found in the folder above
from measuring import CLASSES, Measurement, as_text, machine_of  # noqa: E402
from precedent.runtime.instructions import KERNELS  # noqa: E402

QUIET, PATIENCE = 0.5, 300.0
"""Load above which nothing is measured, and seconds to wait for the load that the measurement before has left."""

RETAIL, AIRLINE = "TRACES/tau_retail.jsonl.gz", "TRACES/tau_airline.jsonl.gz"
CUT = "--truncate --max-prompt-tokens 1000"
MISLED = f"{RETAIL} --warm 4 --measured 24 --modes"
POOLS = "--warm 24 --measured 12 --modes plain ngram suffix precedent free-width"

COMMANDS = {
    "demo": "precedent demo --full --fresh",
    "untrained": "precedent demo --target smollm2-135m-instruct --requests 16 --fresh",
    "both": "bench_both.py",
    "run-ahead": "precedent demo --tool-latency 0.4 --fresh",
    "rows": "bench_rows.py",
    "busy": "bench_busy.py",
    "gpu-steps": "bench_gpu.py --parts steps attention verification",
    "gpu-batches": "bench_gpu.py --parts batches bitwise",
    "gpu-decoding": "bench_gpu.py --parts decoding",
    "gpu-agents": "bench_gpu.py --parts pair",
    "adversarial": "precedent bench --topics --modes plain,adversarial,ours-cold --prompts 16 --warm 6",
    "software": f"precedent bench --traces {RETAIL} --prompts 12 --warm 24 {CUT} "
    "--modes plain,generate,prompt-lookup,ours",
    "gguf": f"bench_gguf.py --traces {RETAIL} --answers 6",
    "replay": "FILES=tau_retail bench_replay.sh TRACES --limit 300",
    "replay-airline": "FILES=tau_airline bench_replay.sh TRACES --limit 150",
    "replay-online": "POOLS=online bench_replay.sh TRACES --limit 150",
    "filling": f"bench_filling.py {AIRLINE}",
    "replay-paths": "POOLS=online bench_replay.sh TRACES --limit 150 --one-path --budget 16",
    "branches": f"bench_branches.py {AIRLINE} {RETAIL} TRACES/tau_retail_repeats.jsonl.gz "
    "TRACES/intercode_sql.jsonl.gz TRACES/bfcl.jsonl.gz TRACES/react_qa.jsonl.gz",
    "ablation": f"precedent replay {AIRLINE} --pool same-task --ablate all --budget 32 --limit 150 --calibration",
    "actions": f"precedent replay --actions {AIRLINE} --pool other-tasks",
    "steps": "profile_step.py --tokens 64",
    "server": "bench_server.py --rounds 20",
    "server-memory": "bench_server.py --rounds 1 --minutes 20",
    "dialects": "bench_dialects.py",
    "start": "bench_start.py",
    "install": "bench_install.py",
    "restart": "bench_restart.py",
    "concurrency": "precedent bench --concurrency 4",
    "store": "bench_store.py 1000 10000 100000 1000000",
    "vllm-recorded": f"bench_vllm.py --traces {RETAIL} --warm 48 --measured 24 --modes plain ngram suffix precedent "
    "free-width empty",
    "vllm-retail-other": f"bench_vllm.py --traces {RETAIL} --pool other-task {POOLS}",
    "vllm-airline": f"bench_vllm.py --traces {AIRLINE} {POOLS}",
    "vllm-airline-other": f"bench_vllm.py --traces {AIRLINE} --pool other-task {POOLS}",
    "vllm-adversarial": f"bench_vllm.py --traces {MISLED} nothing adversarial",
    "vllm-misled": f"bench_vllm.py --traces {MISLED} plain nothing misled",
    "vllm-desk": "bench_vllm.py --warm 8 --measured 4 --modes nothing ngram precedent",
    "bitwise": "bench_bitwise.py --texts 200 --tokens 40",
    "rounding": "bench_rounding.py --prompts 8",
    "verify": "bench_verify.py --draft noisy:1 --limit 1",
}
"""What measures each file of `docs/figures`, after settings for it; TRACES is the folder with recorded runs."""

BY_MACHINE = {"demo": ("avx2",), "rows": ("avx512", "avx2"), "adversarial": (), "bitwise": (), "gguf": ("avx2",)}
"""Measurements with a file per class of machines, and the kernels of lesser processors that are measured as well."""

ENVIRONMENTS = {"bench_vllm.py": "vllm", "bench_gguf.py": "llama-cpp"}
"""Programs that need the environment of `make test-NAME`; beside AVX2 alone, llama.cpp has to be built for it too:
make test-gguf LLAMA_VENV=.venv-llama-cpp-avx2 LLAMA_MARCH=x86-64-v3."""


class Refused(Exception):
    """Why something is not measured."""


@dataclass(frozen=True)
class Run:
    """One command on this machine, or with the kernels of a lesser one."""

    name: str
    traces: Path | None = None
    kernels: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """What its command line sets in the environment."""
        return dict(re.findall(r"^([A-Z]+)=(\S+) ", COMMANDS[self.name]))

    @property
    def program(self) -> list[str]:
        """The program and its arguments, as `COMMANDS` names them."""
        return COMMANDS[self.name].split()[len(self.settings) :]

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        own = ENVIRONMENTS.get(self.program[0])
        own = f"{own}-{self.kernels}" if own == "llama-cpp" and self.kernels else own
        return ROOT / (f".venv-{own}" if own else ".venv") / "bin" / "python"

    @property
    def words(self) -> list[str]:
        """The command line. Raises Refused if something it needs is missing."""
        if not self.python.exists():
            raise Refused(f"needs {self.python.parents[1].name}: make test{self.python.parents[1].name[5:]}")
        program, *given = self.program
        if program == "bench_gpu.py" and not Path("/dev/nvidia0").exists():
            raise Refused("needs a CUDA device")
        if "TRACES" in COMMANDS[self.name] and self.traces is None:
            raise Refused("needs recorded runs: --traces FOLDER")
        given = [word.replace("TRACES", str(self.traces)) for word in given]
        missing = [Path(word).name for word in given if word.endswith(".jsonl.gz") and not Path(word).exists()]
        if missing:
            raise Refused(f"needs {', '.join(missing)} in the folder of --traces")
        if program in ("precedent", "python"):
            return [str(self.python.with_name(program)), *given]
        return [*([] if program.endswith(".sh") else [str(self.python)]), str(ROOT / "benchmarks" / program), *given]

    def measure(self, log: Path) -> str:
        """Write its file; returns the file's name. Raises Refused if the command fails."""
        kernels = f"{KERNELS}={self.kernels} " if self.kernels else ""
        shown, told = kernels + COMMANDS[self.name].replace("TRACES/", ""), log.with_suffix(".json")
        words, ours = self.words, Measurement(shown, kernels=self.kernels)
        environment = os.environ | self.settings | ({KERNELS: self.kernels} if self.kernels else {})
        with log.open("w", encoding="utf-8") as output:
            command = [*words, "--json", str(told)]
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
        if done.returncode:
            raise Refused(f"failed: see {log}")
        found = json.loads(told.read_text(encoding="utf-8"))
        if shown.startswith((f"{kernels}precedent ", "python ")):  # benchmarks say when and where themselves
            found = ours.as_dict(found)
        file = ROOT / "docs" / "figures" / f"{self.file(found['machine'])}.json"
        file.write_text(as_text(found), encoding="utf-8")
        return file.name

    def file(self, machine: dict[str, Any]) -> str:
        """Name the file: with the machine's class where each class has one."""
        limited = "-limited" * bool(machine.get("limited"))
        return f"{self.name}-{machine['class']}{limited}" if self.name in BY_MACHINE else self.name


def wait_until_quiet(patience: float) -> None:
    """Wait until the load is low. Raises Refused after so many seconds."""
    until = time.monotonic() + patience
    while (load := os.getloadavg()[0]) > QUIET:
        if time.monotonic() > until:
            raise Refused(f"the load is {load:.2f}: let nothing else run, or add --busy")
        time.sleep(5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all that was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--busy", action="store_true", help="measure although other programs run")
    parser.add_argument("--traces", type=Path, default=os.environ.get("PRECEDENT_TRACES"), help="recorded runs")
    given, order, here = parser.parse_args(arguments), list(CLASSES), machine_of()["class"]
    if unknown := [name for name in given.names if name not in COMMANDS]:
        parser.error(f"there is no {unknown[0]!r}; choose from {', '.join(COMMANDS)}")
    lesser = order[order.index(here) + 1 :] if here in order else []
    traces, logs = given.traces and Path(given.traces).resolve(), ROOT / "build" / "figures"
    logs.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in given.names or COMMANDS:
        for kernels in (None, *(each for each in BY_MACHINE.get(name, ()) if each in lesser)):
            print(f"== {name}: {COMMANDS[name]} {kernels or ''} …", end=" ", flush=True)
            try:
                Run(name, traces, kernels).words  # noqa: B018  # refuses before it waits
                if not given.busy:
                    wait_until_quiet(PATIENCE)
                print(f"docs/figures/{Run(name, traces, kernels).measure(logs / f'{name}.log')}", flush=True)
            except Refused as reason:
                print(reason, flush=True)
                failed += "failed" in str(reason)
    return failed + subprocess.run([sys.executable, ROOT / ".ci" / "figures.py"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
