"""Prints the demo's table and the lines below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from precedent_demo.demo_verdict import doubts, requests, verdict

NEAR_TIE = 1e-4
"""Below this logit gap, a difference from plain decoding comes from rounding."""

OWN_CHAIN = "the order desk's own, a chain of two layers"
OWN_BLOCK = "the order desk's own, a block of eight positions"
"""What results call the packaged draft models."""

HEADINGS = (
    "tok/\nstep",
    "tok/\ns",
    "decode\nspeed",
    "request\nspeed",
    "prefill\ns",
    "decode\ns",
    "requests\ns",
    "equal",
    "solved",
)
"""Seconds are sums over all requests; those of requests count from submission to the last token."""


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print the table, the accepted tokens by source, the first differences, and the verdict."""
    console.print(_table(results))
    for line in (*sources(results), *draft_models(results), *_differences(results)):
        console.print(line, highlight=False)
    console.print(f"\n{verdict(results)}", soft_wrap=True, highlight=False)


def rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """The cells of each run: its name, then one per heading; without speeds if there are doubts about them."""
    comparable = not doubts(results)
    for run in results["runs"]:
        same = results["identical_outputs"].get(run["name"])
        yield [
            run["name"],
            f"{run['tokens_per_step']:.2f}",
            f"{run['tokens_per_second']:.1f}",
            *(f"{run[f'{what}_speedup']:.2f}x" if comparable else "–" for what in ("decode", "request")),
            f"{run['prefill_seconds']:.1f}",
            f"{run['decode_seconds']:.1f}",
            f"{run['request_seconds']:.1f}",
            f"{same[0]}/{same[1]}" if same else "–",
            f"{run['solved']}/{run['requests']}",
        ]


def sources(results: Mapping[str, Any]) -> Iterator[str]:
    """For each run that drafted: how many tokens were accepted, and which drafters had proposed them."""
    for run in results["runs"]:
        if run["num_draft_tokens"]:
            found = ", ".join(f"{count} by {source}" for source, count in run["accepted_by_source"].items())
            counts = f"{run['num_accepted_tokens']} of {run['num_draft_tokens']} drafted tokens accepted"
            yield f"{run['name']}: {counts}{f' ({found})' if found else ''}"


def draft_models(results: Mapping[str, Any]) -> Iterator[str]:
    """How the other draft model compares, where one was measured; where to see it, for the packaged ones."""
    machine, speeds = results["machine"], {run["name"]: run["tokens_per_second"] for run in results["runs"]}
    other = machine.get("other_draft_model")
    if other is None:
        if machine["draft_model"] == OWN_CHAIN:
            yield f"draft model: {OWN_CHAIN}; the block draft was no faster where it was measured, --full measures both"
    elif not doubts(results):
        ratios = " and ".join(f"{way} {speeds[f'{way}, other'] / speeds[way]:.2f}" for way in ("draft-only", "both"))
        yield f"other draft model: {other}; tokens per second, beside the first ({machine['draft_model']}): {ratios}"


def _table(results: Mapping[str, Any]) -> Table:
    machine, plain = results["machine"], results["runs"][0]
    setting = f"{machine['target']}, {machine['dtype']}, {machine['device']}, temperature {results['temperature']}"
    title = f"{requests(plain['requests'])}, {plain['tokens']} tokens\n{setting}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows(results):
        table.add_row(*row)
    return table


def _differences(results: Mapping[str, Any]) -> Iterator[str]:
    for difference in results["first_differences"]:
        kind = "near-tie" if difference["logit_gap"] < NEAR_TIE else "difference"
        yield (
            f"{kind}: {difference['run']}, request {difference['request']}, token {difference['position']}: "
            f"the two tokens' logits differ by {difference['logit_gap']:.2g}"
        )
