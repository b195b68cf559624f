"""The demo's HTML page: its figures, and some answers with each token coloured by the drafter that proposed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from precedent.pages.colours import Palette
from precedent.pages.render import Decode, page, pieces
from precedent_demo.demo_table import HEADINGS, rows
from precedent_demo.demo_verdict import requests, verdict

if TYPE_CHECKING:
    from precedent_demo.demo_runs import Run

MOST_REQUESTS = 6
"""Requests shown for each run."""

OPEN = "both"
"""The run that is unfolded when the page opens."""


def demo_page(results: Mapping[str, Any], runs: Mapping[str, Run], decode: Decode) -> str:
    """The HTML document: model, machine, table, legend, and the answers of some requests."""
    counts = Counter(source for run in runs.values() for turns in run.requests for turn in turns
                     for source in turn.result.sources)  # fmt: skip
    palette = Palette()
    return page(
        "demo.html.jinja",
        title="Where the tokens came from",
        verdict=verdict(results),
        facts=list(_facts(results)),
        headings=("run", *(heading.replace("\n", " ") for heading in HEADINGS)),
        rows=list(rows(results)),
        legend=palette.legend(counts),
        counts=counts,
        runs=[_shown(name, run, decode, palette) for name, run in runs.items()],
    )


def _facts(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine, plain = results["machine"], results["runs"][0]
    busy = machine["others_cpu_share"]
    yield "model", f"{machine['target']}, {machine['dtype']}"
    yield "draft model", machine["draft_model"]
    if "other_draft_model" in machine:
        yield "other draft model", machine["other_draft_model"]
    parts = machine["processor"], machine["device"], f"{machine['threads']} threads", f"torch {machine['torch']}"
    yield "machine", ", ".join(parts)
    yield "other programs", "not known" if busy is None else f"used {busy:.0%} of the CPU during the measurement"
    yield "temperature", f"{results['temperature']:g}{' (greedy)' if results['temperature'] == 0 else ''}"
    yield "measured", f"{requests(plain['requests'])} per run; plain decoding wrote {plain['tokens']} tokens"


def _shown(name: str, run: Run, decode: Decode, palette: Palette) -> dict[str, Any]:
    requests = [
        [pieces(turn.result.token_ids, turn.result.sources, decode, palette) for turn in turns]
        for turns in run.requests[:MOST_REQUESTS]
    ]
    note = f"{run.as_dict()['tokens_per_step']:.1f} tokens per step"
    return {"name": name, "note": note, "requests": requests, "open": name == OPEN}
