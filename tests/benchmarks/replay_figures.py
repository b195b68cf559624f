"""Reads what `bench_replay.sh` wrote, and prints one line per figure: python replay_figures.py RESULTS.json ...

`--json FILE` writes the figures of documentation pages; `--command` and `--load` are of the script that replayed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from measurement import Measurement, json_option

Row = Mapping[str, Any]

WANTED = {
    ("online", 16, "ratio"): 1.10,
    ("online", 32, "ratio"): 1.17,
    ("online", 64, "ratio"): 1.22,
    ("same-task", 32, "ratio"): 1.25,
    ("same-task", 32, "ratio_tool_calls"): 1.40,
    ("other-tasks", 32, "ratio"): 1.15,
}
"""Ratios to the best baseline with no more verified nodes per step that Precedent sets itself."""


def figures(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """A header with what is known of the answers, and a line for each budget and kind of turn."""
    repeats, turns = found["exact_repeats"], max(1, found["turns"])
    yield (
        f"{name}: {found['turns']} turns, {found['tokens']} tokens, {repeats / turns:.0%} exact repeats, "
        f"{found['repetition']:.1%} of the tokens repeat four of their own answer"
    )
    for row in found["drafters"]:
        for kind in ("", "_tool_calls", "_text") if row["whole"] else ():
            yield "  " + line(row, kind, found)


def line(row: Row, kind: str, found: Mapping[str, Any]) -> str:
    """Tokens and nodes per step, the ratio, and whether it is what was wanted."""
    wanted = WANTED.get((found["settings"]["pool"], row["budget"], f"ratio{kind}"))
    wanted = wanted if row["curve"] == "flat" else None
    counts = row["kinds"][kind[1:]] if kind else row
    ratio = row[f"ratio{kind}"]
    said = f"{row['name']:<28} {kind[1:] or 'all':<10} {counts['tokens_per_step']:6.2f} tok/step"
    said += f" {counts['draft_tokens_per_step']:6.1f} nodes"
    if ratio is None:
        return said + "   no baseline verifies so few nodes"
    goal = "" if wanted is None else f"   wanted {wanted:.2f}: {'reached' if ratio >= wanted else 'MISSED'}"
    return said + f"   {ratio:5.3f} x {row[f'best_baseline{kind}']:<16}{goal}"


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """What pages show: each budget of all drafters together, where every step costs the same."""
    rows = [row for row in found["drafters"] if row["whole"] and row["curve"] == "flat"]
    return {"turns": found["turns"], "tokens": found["tokens"], "budgets": {row["budget"]: of_row(row) for row in rows}}


def of_row(row: Row) -> dict[str, Any]:
    """Tokens per step and the ratio to the best baseline, in all and on tool calls."""
    calls = row["kinds"]["tool_calls"]["tokens_per_step"]
    return {
        "tokens_per_step": row["tokens_per_step"],
        "ratio": row["ratio"],
        "best_baseline": row["best_baseline"],
        "tool_calls": {"tokens_per_step": calls, "ratio": row["ratio_tool_calls"]},
    }


def main() -> None:
    """Print the figures of all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--command", default="tests/benchmarks/bench_replay.sh FOLDER")
    parser.add_argument("--load", type=float, help="load of the machine before the replays")
    json_option(parser)
    given = parser.parse_args()
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in given.results}
    for name, results in found.items():
        for text in figures(name, results):
            print(text)
    measurement = Measurement(given.command, load=given.load)
    measurement.write(given.json, {name: shown(results) for name, results in found.items()})


if __name__ == "__main__":
    main()
