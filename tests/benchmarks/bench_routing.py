"""What routing changes in a fleet: recorded runs played through replicas in several ways, without a model.

    python tests/benchmarks/bench_routing.py tau_airline.jsonl.gz [--limit 600] [--replicas 100] [--json FILE]

Each way is what `precedent replay --embedder none --tenants 34 --limit 600 --replicas 100 --routing …` prints.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurement import Measurement, json_option

from precedent.replay.fleet import Fleet, simulate
from precedent.replay.run import Settings
from precedent.target.load.loading import load_tokenizer

TOKENIZER = "smollm2-135m-instruct"
ROUTINGS = ("tenant", "prefix", "random")
LATE, ALONE, FEW_TOKENS = 20, 10**9, 2000
"""Runs after which others see one; so many that they never do; tokens of a small memory."""


def ways(whole: Fleet) -> dict[str, Fleet]:
    """What is compared, in the order of the table."""
    by = {name: replace(whole, routing=name) for name in ROUTINGS}
    return {
        "one replica": replace(whole, replicas=1),
        **{f"by {name}": fleet for name, fleet in by.items()},
        **{f"by {name}, late": replace(by[name], staleness=LATE) for name in ("tenant", "random")},
        **{f"by {name}, small": replace(by[name], memory_tokens=FEW_TOKENS) for name in ("tenant",)},
        **{f"by {name}, alone": replace(by[name], staleness=ALONE) for name in ("prefix", "random")},
    }


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a simulation."""
    names = ("hit_rate", "prefix_hit_rate", "replicas_used", "busiest_share")
    return {"tokens_per_step": found["drafters"][-1]["tokens_per_step"], **{name: found[name] for name in names}}


def main() -> None:
    """Print a line for each way, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=600, help="answers, from the first")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--tenants", type=int, default=34)
    json_option(parser)
    given = parser.parse_args()
    measurement, found = Measurement(), dict[str, Any]()
    tokenizer, settings = load_tokenizer(TOKENIZER), Settings(limit=given.limit)
    for name, fleet in ways(Fleet(given.replicas, tenants=given.tenants)).items():
        found[name] = figures(simulate(given.traces, (), tokenizer, None, settings, fleet).as_dict())
        print(f"{name:16}", *(f"{what} {value:g}" for what, value in found[name].items()), flush=True)
    sizes = {"replicas": given.replicas, "tenants": given.tenants, "answers": given.limit}
    measurement.write(given.json, {**sizes, "ways": found})


if __name__ == "__main__":
    main()
