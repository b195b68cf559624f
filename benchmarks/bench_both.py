"""Decoding with memory and a draft model against memory alone: runs of the demo's two ways, request by request.

    python benchmarks/bench_both.py [--requests 8] [--runs 10] [--warming 16] [--json FILE]

The ways alternate within every run, and each takes the lead in half of the requests. Every run has new engines, and
ends before the draft model's first trial beside memory is due (`precedent.planning.gate.FIRST_AFTER` steps).
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from contextlib import closing
from typing import Any

from measuring import options, run
from precedent.cli.progress import Progress
from precedent_demo import make_database, make_requests
from precedent_demo.demo import ORDER_DESK, Asked
from precedent_demo.demo_runs import Sample, loaded, speedup_keys, warm

WAYS = ("cache-only", "both")
SHOWN = ("tokens", "tokens_per_step", "milliseconds_per_step", "accepted_by_source")


def one_run(number: int, given: Namespace) -> tuple[dict[str, Any], dict[str, list[Sample]]]:
    """Measure both ways with new engines: what the run shows, and the samples of each way."""
    asked = Asked(
        target=ORDER_DESK, draft_model=None, device=None, dtype=None, chat_template=None, temperature=0.0, full=False,
        requests=None, fresh=False, tool_latency=None,
    )  # fmt: skip
    others, own = (make_requests(name, full=False, seed=0) for name in ("A", "B"))
    if given.requests > len(own):
        sys.exit(f"--requests: there are {len(own)}")
    bench, state, _ = loaded(asked, Progress(), WAYS)
    with closing(bench):
        warm(bench, state, others[: given.warming], Progress())
        for index, request in enumerate(own[: given.requests]):
            for name in WAYS if (index + number) % 2 else WAYS[::-1]:
                bench.measure(request, make_database(seed=0), name)
        shown = {name: {key: run.as_dict()[key] for key in SHOWN} for name, run in bench.runs.items()}
        return shown, {name: run.samples("decode_seconds") for name, run in bench.runs.items()}


def measure(given: Namespace) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    runs, samples = list[dict[str, Any]](), {name: list[Sample]() for name in WAYS}
    for number in range(given.runs):
        shown, own = one_run(number, given)
        runs.append(shown | speedup_keys("both_over_cache", own["both"], own["cache-only"]))
        print(runs[-1], file=sys.stderr)
        for name, some in own.items():
            samples[name] += some
    return speedup_keys("both_over_cache", samples["both"], samples["cache-only"]) | {"runs": runs}


if __name__ == "__main__":
    run(options(__doc__, requests=8, runs=10, warming=16), measure)
