"""What the lossy modes gain and lose on the order desk, and how far each is from the best rule.

    python tests/benchmarks/bench_lossy.py --requests 40 --sampled 20 --rows 8 --keep kept.json --svg lossy.svg

Serves held-out requests (set B) with the desk's target and its draft model: greedily in every mode that accepts more
there, and at temperature 1 in some; then visits the rows of eight conversations and reports each mode's rejections
against its total variation beside the Pareto front. What `--keep` holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lossy_bench import closed_loop, picture, rows
from lossy_bench.desk import Desk
from measurement import Measurement, json_option

JUDGE, DIVERGENCE = "lossy_judge:name=order-desk", "lossy_judge:name=order-desk-divergence"
GREEDY = ("auto", "lossy_top_beta:beta=2,tau=1", DIVERGENCE, f"{JUDGE},threshold=0.12", JUDGE, f"{JUDGE},threshold=1")
"""At temperature 0 the target's row is certain, so the mentored and the typical rule change nothing there. The judge's
thresholds: one that left 99 % of the mismatches that matter rejected, its own (90 %), and the draft model unchecked."""

SAMPLED = ("auto", "lossy_mentored:kl=0.05", "lossy_mentored:kl=0.5", JUDGE)
ROWS = (
    "lossy_mentored:kl=0.05",
    "lossy_mentored:kl=0.5",
    "lossy_typical",
    "lossy_typical:epsilon=0.3,delta=0.6",
    "lossy_top_beta:beta=2,tau=1",
    "lossy_top_beta:beta=3,tau=3",
    DIVERGENCE,
    JUDGE,
)


class Results:
    """Results by key in a JSON file, written after each measurement."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.is_file() else {}

    def of(self, key: str, measure: Callable[[], Any]) -> Any:
        """The result of a key, measured unless it is known."""
        if key not in self.found:
            print(f"measuring {key}", file=sys.stderr, flush=True)
            self.found[key] = measure()
            if self._path is not None:
                self._path.write_text(json.dumps(self.found, indent=2) + "\n")
        return self.found[key]


def show(conversations: list[dict[str, Any]], of_rows: dict[str, Any]) -> None:
    """Print the tables as Markdown."""
    print("| temperature | mode | tokens per step | solved | lost, won | total variation per token |")
    print("|---|---|---|---|---|---|")
    for each in conversations:
        lossless = next(one for one in conversations if one["temperature"] == each["temperature"])
        lost, won = closed_loop.against(lossless, each)
        low, high = (round(100 * end) for end in each["interval"])
        print(
            f"| {each['temperature']:g} | `{each['mode']}` | {each['tokens_per_step']:.2f} | {each['solved']} of "
            f"{each['requests']} ({low} to {high} %) | {lost}, {won} | {each['spent_per_token']:.4f} |"
        )
    for name, found in of_rows.items():
        print(f"\n{name}: {found['nodes']} nodes, least rejections {found['least_rejections']:.4f}\n")
        print("| mode | rejections | total variation | above the front |\n|---|---|---|---|")
        for point in found["points"]:
            print(
                f"| `{point['mode']}` | {point['rejections']:.4f} | {point['total_variation']:.4f} | "
                f"{abs(point['above_front']):.4f} |"
            )


def figures(conversations: list[dict[str, Any]], of_rows: dict[str, Any]) -> dict[str, Any]:
    """What the tables show, mode by mode."""
    told = []
    for each in conversations:
        lossless = next(one for one in conversations if one["temperature"] == each["temperature"])
        lost, won = closed_loop.against(lossless, each)
        kept = {name: value for name, value in each.items() if name != "solved_each"}
        told.append(kept | {"said": said(each["mode"]), "lost": lost, "won": won})
    sides = {
        name: {"nodes": found["nodes"], "least_rejections": found["least_rejections"]}
        for name, found in of_rows.items()
    }
    lossless = {name: {"rejections": one["least_rejections"], "total_variation": 0.0} for name, one in sides.items()}
    points = [{"said": said("auto")} | lossless]
    points += [
        {"said": said(point["mode"])} | {name: found["points"][place] for name, found in of_rows.items()}
        for place, point in enumerate(of_rows["draft"]["points"])
    ]
    return {"conversations": told, "rows": points, "nodes": sides}


def said(mode: str) -> str:
    """A mode as tables name it."""
    return "lossless" if mode == "auto" else f"`{mode}`"


def main() -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="greedy conversations per mode")
    parser.add_argument("--sampled", type=int, default=20, help="conversations per mode at temperature 1")
    parser.add_argument("--rows", type=int, default=8, help="conversations whose rows are visited")
    parser.add_argument("--keep", type=Path, help="keep each result here, and go on from them")
    json_option(parser)
    parser.add_argument("--svg", type=Path, help="draw the picture here")
    options = parser.parse_args()
    measurement, desk, results = Measurement(), Desk(), Results(options.keep)
    asked = [
        *((mode, 0.0, options.requests) for mode in GREEDY),
        *((mode, 1.0, options.sampled) for mode in SAMPLED),
    ]
    conversations = [
        results.of(f"{each[0]} at {each[1]:g}, {each[2]} requests", partial(closed_loop.measure, desk, *each))
        for each in asked
    ]
    of_rows = results.of(f"rows of {options.rows}", partial(rows.measure, desk, ROWS, options.rows))
    show(conversations, of_rows)
    measurement.write(options.json, figures(conversations, of_rows))
    if options.svg is not None:
        options.svg.write_text(picture.lossy_svg(conversations, of_rows["draft"]), encoding="utf-8")


if __name__ == "__main__":
    main()
