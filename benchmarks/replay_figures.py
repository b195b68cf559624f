"""Collects what `bench_replay.sh` measured: python benchmarks/replay_figures.py RESULTS.json … [--json FILE]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring import Measurement, options


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    """Tokens per step, and the ratio to the best baseline with no more verified nodes per step."""
    calls = {"tokens_per_step": row["kinds"]["tool_calls"]["tokens_per_step"], "ratio": row["ratio_tool_calls"]}
    return {name: row[name] for name in ("tokens_per_step", "ratio", "best_baseline")} | {"tool_calls": calls}


def main() -> None:
    """Print the figures of all files, and write them."""
    parser = options(__doc__, command="benchmarks/bench_replay.sh FOLDER", load=float)
    parser.add_argument("results", nargs="+", type=Path)
    given, figures = parser.parse_args(), dict[str, Any]()
    for path in given.results:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in found["drafters"] if row["whole"] and row["curve"] == "flat"]
        budgets = {row["budget"]: of_row(row) for row in rows}
        baselines = {row["name"]: row["tokens_per_step"] for row in found["drafters"] if row["baseline"]}
        counted = {"turns": found["turns"], "tokens": found["tokens"]}
        figures[path.stem] = {**counted, "budgets": budgets, "baselines": baselines}
    print(json.dumps(figures, indent=1))
    Measurement(given.command, load=given.load).write(given.json, figures)


if __name__ == "__main__":
    main()
