"""Seconds of `import precedent`, to a program's answer, and to that of `precedent serve`; with empty caches, and again.

    python benchmarks/bench_start.py [--runs 3] [--json FILE]

Each run starts programs and command with an empty user cache folder each, then again with what the first start left
there. The first request is made with the openai package. Let nothing else run meanwhile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

from openai import OpenAI

from measuring import options, run, seconds

COMMAND = "from precedent.cli.app import main; main()"

PROGRAMS = {
    "import": "import precedent",
    "program": "import precedent\n"
    "precedent.ChatPrecedent(model='smollm2-135m-instruct', max_tokens=16).invoke('Hello!')",
}
"""Programs that are timed from the start of Python to its end."""


def with_caches_in(folder: str) -> dict[str, str]:
    """This process's environment with other folders for all that a start leaves, compiled Python and kernels too."""
    left = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX")
    return {**os.environ, **dict.fromkeys(left, folder), "PYTHONDONTWRITEBYTECODE": ""}


def ended(program: str, environment: Mapping[str, str], folder: str) -> float:
    """Seconds that a program takes."""
    return seconds(lambda: subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, check=True))


def started(environment: Mapping[str, str], folder: str) -> dict[str, float]:
    """Seconds until the server prints its address, and until its first answer is complete."""
    begun, command = perf_counter(), [sys.executable, "-c", COMMAND, "serve", "--port", "0"]
    server = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = list[str]()
        while not (found := re.search(r"http://[\d.]+:\d+", printed[-1] if printed else "")):
            assert server.stdout is not None
            printed.append(server.stdout.readline())
            if not printed[-1]:
                raise SystemExit("precedent serve ended:\n" + "".join(printed))
        listens = perf_counter() - begun
        asked: Any = {"messages": [{"role": "user", "content": "Hello!"}], "max_completion_tokens": 16}
        client = OpenAI(base_url=f"{found[0]}/v1", api_key="none")
        client.chat.completions.create(model="smollm2-135m-instruct", **asked)
        return {"listens": listens, "first_answer": perf_counter() - begun}
    finally:
        server.terminate()
        server.communicate()


def measure(given: Namespace) -> dict[str, dict[str, float]]:
    runs: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as servers:
            for start in runs.values():
                programs = {name: ended(program, with_caches_in(ours), ours) for name, program in PROGRAMS.items()}
                start.append(programs | started(with_caches_in(servers), servers))
    return {name: {part: median(one[part] for one in each) for part in each[0]} for name, each in runs.items()}


if __name__ == "__main__":
    run(options(__doc__, runs=3), measure)
