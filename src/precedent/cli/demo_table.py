"""The demo's table and the sentence that says what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

NEAR_TIE = 1e-4
"""A difference at a smaller logit gap is rounding, not another opinion."""


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print the table, the first differences, and one sentence."""
    plain = results["runs"][0]
    console.print(_table(results, plain))
    _show_sources(console, results)
    _show_differences(console, results)
    console.print(_sentence(results, plain), soft_wrap=True)


def _table(results: Mapping[str, Any], plain: Mapping[str, Any]) -> Table:
    machine = results["machine"]
    setting = f"{machine['target']}, {machine['dtype']}, {machine['device']}, temperature {results['temperature']}"
    table = Table(
        title=f"{plain['requests']} requests, {plain['tokens']} tokens\n{setting}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("run", no_wrap=True)
    for heading in ("tok/s", "speed", "tok/\nstep", "prefill\ns", "decode\ns", "request s\np50/p95", "equal", "solved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in results["runs"]:
        table.add_row(*_row(run, plain, results["identical_outputs"]))
    return table


def _row(run: Mapping[str, Any], plain: Mapping[str, Any], identical: Mapping[str, Any]) -> list[str]:
    same = identical.get(run["name"])
    return [
        run["name"],
        f"{run['tokens_per_second']:.1f}",
        f"{_speed(run, plain):.2f}x",
        f"{run['tokens_per_step']:.2f}",
        f"{run['prefill_seconds']:.1f}",
        f"{run['decode_seconds']:.1f}",
        f"{run['request_seconds_p50']:.1f}/{run['request_seconds_p95']:.1f}",
        f"{same[0]}/{same[1]}" if same else "-",
        f"{run['solved']}/{run['requests']}",
    ]


def _show_sources(console: Console, results: Mapping[str, Any]) -> None:
    for run in results["runs"]:
        sources = ", ".join(f"{count} by {source}" for source, count in run["accepted_by_source"].items())
        if run["num_draft_tokens"]:
            console.print(
                f"{run['name']}: {run['num_accepted_tokens']} of {run['num_draft_tokens']} drafted tokens accepted"
                f"{' (' + sources + ')' if sources else ''}",
                highlight=False,
            )


def _speed(run: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    return run["tokens_per_second"] / plain["tokens_per_second"] if plain["tokens_per_second"] else 0.0


def _show_differences(console: Console, results: Mapping[str, Any]) -> None:
    for difference in results["first_differences"]:
        kind = "near-tie" if difference["logit_gap"] < NEAR_TIE else "difference"
        console.print(
            f"{kind}: {difference['run']}, request {difference['request']}, token {difference['position']}: "
            f"the two tokens' logits lie {difference['logit_gap']:.2g} apart"
        )


def _sentence(results: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    runs = {run["name"]: run for run in results["runs"]}
    both, repeat = runs["both"], runs["repeat"]
    promise = (
        "sampled from the target model's own law"
        if results["temperature"] > 0
        else f"{results['identical_outputs']['both'][0]} of {plain['requests']} answers identical to plain"
    )
    return (
        f"A cache warmed by other requests made decoding {_speed(both, plain):.1f} times as fast "
        f"({both['tokens_per_step']:.1f} tokens per step) and {_speed(repeat, plain):.1f} times having seen these, "
        f"{promise}; the target model itself chose every token."
    )
