"""Writes conversations of the expert as chat traces (JSONL), for `replay`, `train-draft` and `measure-draft`.

python -m precedent_demo.training.logs --set A --requests 40 --out desk.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from precedent_demo.conversation import SYSTEM_PROMPT
from precedent_demo.desk import OrderDesk
from precedent_demo.judging import task_of
from precedent_demo.training.trajectories import expert_messages, tool_schemas
from precedent_demo.workflows import SPLITS, generate_requests


def logged(set_name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Endless conversations of a set on the database of `seed`; their task ids tell set, number and seed."""
    desk, rng = OrderDesk.from_seed(seed, SPLITS[set_name]), random.Random(f"log {set_name} {seed}")
    system = {"role": "system", "content": SYSTEM_PROMPT}
    for request in generate_requests(set_name, seed, desk):
        messages = [system, *expert_messages(request, desk, rng)]
        yield {
            "task_id": task_of(request, seed),
            "group": request.workflow,
            "messages": messages,
            "tools": tool_schemas(),
        }


def main() -> None:
    """Write the traces that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.training.logs", description=__doc__)
    parser.add_argument("--set", default="A", choices=sorted(SPLITS), dest="set_name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the database and the requests")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as out:
        for record in islice(logged(options.set_name, options.seed), options.requests):
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
