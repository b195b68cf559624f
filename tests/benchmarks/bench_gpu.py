"""The target on a GPU: steps against the memory's floor, attention variants, graphs, verification, decoding, agents.

    python tests/benchmarks/bench_gpu.py --json gpu.json --markdown gpu.md --svg docs/images/roofline.svg \
        [--traces tau_retail.jsonl.gz --tokenizer FOLDER] [--minutes 9]

A model of Llama 3 8B's shape with random bfloat16 weights, made here; nothing is downloaded. Each part fails alone and
what it had found stays; after `--minutes` nothing new is begun. `--small --device cpu` tries the program alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gpu_bench.decoding import decoding_rates
from gpu_bench.demo_pair import demo_pair
from gpu_bench.report import markdown, roofline
from gpu_bench.same_bits import bitwise_times
from gpu_bench.setting import Part, Setting, TimeIsUp, existing
from gpu_bench.steps import attention_times, batch_times, step_times, verification_times
from gpu_bench.trace_replay import replayed
from measurement import Measurement, json_option

PARTS = (
    Part("steps", "A step, in milliseconds", step_times),
    Part("attention", "One layer's attention, in microseconds", attention_times),
    Part("verification", "Verification", verification_times),
    Part("batches", "Several sequences at once", batch_times),
    Part("bitwise", "The same bits whatever was drafted: what it costs", bitwise_times),
    Part("pair", "The order desk's own target and draft model, served by an agent", demo_pair),
    Part("traces", "Recorded answers (they decide what is accepted)", replayed),
    Part("decoding", "Plain decoding", decoding_rates),  # last: transformers' compiled graphs broke ours once
)


def main() -> None:
    """Run all parts and write what they found."""
    given = options().parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --small --device cpu tries the program without one")
    setting = Setting(given, perf_counter())
    measurement = Measurement(gpu=torch.cuda.get_device_name(setting.device) if setting.on_cuda else None)
    results: dict[str, Any] = {"machine": setting.machine, "parts": []}
    for part in PARTS:
        if not given.parts or part.name in given.parts:
            results["parts"].append(run_part(part, setting))
            measurement.write(given.json, results)
            write(results, given)  # after every part: a run that is stopped has lost little
    print(markdown(results))


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny shape, for trying the program")
    parser.add_argument("--minutes", type=float, default=9.0, help="after so many minutes nothing new is begun")
    parser.add_argument("--parts", nargs="*", choices=[part.name for part in PARTS], default=[])
    parser.add_argument("--traces", nargs="*", type=existing, default=[], help="chat traces in OpenAI format")
    parser.add_argument("--tokenizer", help="of the traces: a folder; bytes without one")
    parser.add_argument("--turns", type=int, default=64, help="recorded answers per pool")
    json_option(parser)
    for name in ("markdown", "svg"):
        parser.add_argument(f"--{name}", type=Path)
    return parser


def run_part(part: Part, setting: Setting) -> dict[str, Any]:
    """A part's rows as far as it came, and why it stopped, if it did."""
    rows: list[dict[str, Any]] = []
    stopped = None
    try:
        for row in part.run(setting):
            rows.append(row)
            print(
                part.name, {name: value for name, value in row.items() if name != "flop"}, file=sys.stderr, flush=True
            )
    except TimeIsUp:
        stopped = "the time was up"
    except Exception as error:
        stopped = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return {"name": part.name, "title": part.title, "rows": rows, "stopped": stopped}


def write(results: dict[str, Any], given: argparse.Namespace) -> None:
    """What was found so far, to the files for people that were asked for."""
    if given.markdown:
        given.markdown.write_text(markdown(results), encoding="utf-8")
    steps = [row for part in results["parts"] if part["name"] == "steps" for row in part["rows"]]
    if given.svg and steps:
        given.svg.write_text(roofline(results["machine"], steps), encoding="utf-8")


if __name__ == "__main__":
    main()
