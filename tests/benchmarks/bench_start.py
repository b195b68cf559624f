"""From `precedent serve` to its first answer, in seconds: with nothing converted yet, and once more.

    python tests/benchmarks/bench_start.py [--runs 3] [--json FILE]

Each run starts the command with an empty cache folder of the user's, then again with what the first start left there.
The first request is one of openai-python's. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from measurement import Measurement, json_option
from openai import OpenAI

MODEL = "smollm2-135m-instruct"
COMMAND = "from precedent.cli.app import main; main()"


def started(environment: Mapping[str, str], folder: Path) -> dict[str, float]:
    """Seconds until the server names its address, and until its first answer has ended."""
    begun = perf_counter()
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0"]
    server = subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
    try:
        address = _address(server)
        listens = perf_counter() - begun
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        asked: Any = {"messages": [{"role": "user", "content": "Hello!"}], "max_completion_tokens": 16}
        client.chat.completions.create(model=MODEL, **asked)
        return {"listens": listens, "first_answer": perf_counter() - begun}
    finally:
        server.terminate()
        server.communicate()


def _address(server: subprocess.Popen[bytes]) -> str:
    assert server.stdout is not None
    said = list[str]()
    for line in server.stdout:
        said.append(line.decode())
        if found := re.search(r"http://[\d.]+:\d+", said[-1]):
            return found[0]
    raise SystemExit("precedent serve ended:\n" + "".join(said))


def main() -> None:
    """Measure, print, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    json_option(parser)
    args = parser.parse_args()
    measurement = Measurement()
    runs: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "XDG_CACHE_HOME": folder, "XDG_DATA_HOME": folder}
            for start in runs.values():
                start.append(started(environment, Path(folder)))
    found = {
        name: {part: round(median(one[part] for one in starts), 1) for part in starts[0]}
        for name, starts in runs.items()
    }
    print(json.dumps(found, indent=1))
    measurement.write(args.json, found)


if __name__ == "__main__":
    main()
