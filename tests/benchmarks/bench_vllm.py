"""Speculation of vLLM and ours on the order desk's requests: tokens per step and per second, a server after another.

    .venv-vllm/bin/python tests/benchmarks/bench_vllm.py --warm 24 --measured 12 --modes plain ngram suffix precedent

Each server first serves the `--warm` requests, which fill what it remembers, and then the measured ones, which are
others of the same workflows. `nothing` is a custom drafter that proposes nothing (our kill switch); `empty` is ours,
warmed under another tenant, so that nothing of this one's is stored. A step of a request yields its accepted tokens and
one more: tokens per step are tokens / (tokens - accepted).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.vllm_server import SPECULATION, TOKENS, VllmServer
from helpers.vllm_traffic import desk_runs

from precedent.server.stored_keys import add_key

NGRAM = {"method": "ngram", "num_speculative_tokens": TOKENS, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
SUFFIX = {"method": "suffix", "num_speculative_tokens": TOKENS}
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "suffix": SUFFIX,
    "nothing": SPECULATION,
    "empty": SPECULATION,
    "precedent": SPECULATION,
}
GENERATED, ACCEPTED = "vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def measured(mode: str, warm: int, number: int, folder: Path) -> dict[str, Any]:
    """One server's figures, and what the assistant said."""
    keys = folder / "keys.json"
    key, other = (add_key(keys, name, name) for name in ("shop", "other"))
    settings = {"PRECEDENT_VLLM_STORE": str(folder / "cache.db"), "PRECEDENT_VLLM_API_KEYS": str(keys)}
    ours = MODES[mode] == SPECULATION
    settings |= {"PRECEDENT_VLLM": "off"} if mode == "nothing" else {}
    with VllmServer(folder / "log", MODES[mode], **(settings if ours else {})) as server:
        desk_runs(server, other if mode == "empty" else key, warm)
        before, begun = server.counts(), time.perf_counter()
        said = desk_runs(server, key, number, first=warm)
        seconds = time.perf_counter() - begun
        found = server.counts()
        found.subtract(before)
    tokens, accepted = found[GENERATED], found[ACCEPTED]
    return {
        "mode": mode,
        "tokens": tokens,
        "tokens_per_step": tokens / (tokens - accepted),
        "tokens_per_second": tokens / seconds,
        "decode_seconds": found["vllm:request_decode_time_seconds_sum"],
        "said": said,
    }


def main() -> None:
    """Print a line per mode, and whether its texts are those of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--warm", type=int, default=24)
    parser.add_argument("--measured", type=int, default=12)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    for mode in asked.modes:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measured(mode, asked.warm, asked.measured, Path(folder)))
        one = found[-1]
        same = one.pop("said") if len(found) > 1 else (first := one.pop("said"))
        one["same_texts"] = same == first
        print(
            *(f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}" for name, value in one.items())
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
