"""Reads what `bench_replay.sh` wrote and prints one line per figure: python replay_figures.py RESULTS.json ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def main(paths: Sequence[str]) -> None:
    """Print the figures of all files."""
    for path in paths:
        for text in figures(Path(path).stem, json.loads(Path(path).read_text(encoding="utf-8"))):
            print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
