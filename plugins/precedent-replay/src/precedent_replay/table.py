"""Prints the results of `precedent replay`: a short table and a verdict, or with `--details` all measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from precedent_replay.verdict import says_speed, verdict

Results = Mapping[str, Any]
Row = Mapping[str, Any]


BEST = "* tokens per step divided by those of the best baseline with no more nodes per step"


def show(console: Console, found: Results, *, details: bool) -> None:
    """Print the short table (all tables with `details`), the ablations if there are any, and the verdict."""
    rows = [row for row in found["drafters"] if not row["without"]]
    for table in (_overview(found, rows), _by_kind(rows)) if details else (_short(found, rows),):
        console.print(table)
    ablated = [row for row in found["drafters"] if row["without"]]
    if ablated:
        console.print(_ablations(ablated))
    console.print(f"{BEST}{'' if details else '; --details shows more'}\n", highlight=False, soft_wrap=True)
    console.print(_answers(found), highlight=False)
    console.print(f"\n{verdict(found)}", highlight=False, soft_wrap=True)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), title_justify="left", caption_justify="left")
    table.add_column("drafters", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _title(found: Results) -> str:
    return f"{found['turns']} turns, {found['tokens']} tokens, pool {found['settings']['pool']}"


def _short(found: Results, rows: Sequence[Row]) -> Table:
    """Tokens per step of each drafter set, and its speed-up if step times were measured."""
    timed = says_speed(found)
    table = _table(_title(found), "tokens/\nstep", "vs\nbest*", *(["times as\nfast here"] if timed else []))
    for row in rows:
        speed = [_number(row["speed_on_this_machine"])] if timed else []
        table.add_row(row["name"], _number(row["tokens_per_step"]), _against_best(row), *speed)
    return table


def _against_best(row: Row, kind: str = "") -> str:
    return "" if row["baseline"] else _number(row[f"ratio{kind}"])


def _overview(found: Results, rows: Sequence[Row]) -> Table:
    """Tokens per step, and for each cost curve the tokens per plain step time."""
    curves = list(found["settings"]["curves"])
    costs = (f"tok/cost\n{curve}" for curve in curves)
    table = _table(_title(found), "tok/\nstep", "vs\nbest*", "nodes/\nstep", *costs, "µs/\nstep", "p99")
    for row in rows:
        table.add_row(
            row["name"],
            _number(row["tokens_per_step"]),
            _against_best(row),
            _number(row["draft_tokens_per_step"], 1),
            *(_number(row["tokens_per_plain_step_time_by_curve"][curve]) for curve in curves),
            _number(row["microseconds_per_step"], 0),
            _number(row["microseconds_per_step_p99"], 0),
        )
    return table


def _by_kind(rows: Sequence[Row]) -> Table:
    """Tokens per step for tool calls, for text, and for answers that the pool holds word for word."""
    headings = ("tool\ncalls", "vs\nbest*", "nodes", "text", "vs\nbest*", "nodes", "exact\nrepeats")
    table = _table("tokens per step by kind of turn", *headings)
    for row in rows:
        cells = []
        for kind in ("tool_calls", "text"):
            counts = row["kinds"][kind]
            cells.append(_number(counts["tokens_per_step"] or None))
            cells.append(_against_best(row, f"_{kind}"))
            cells.append(_number(counts["draft_tokens_per_step"], 1))
        table.add_row(row["name"], *cells, _number(row["kinds"]["exact_repeats"]["tokens_per_step"] or None))
    return table


def _ablations(rows: Sequence[Row]) -> Table:
    """The change in tokens per step when one part is left out."""
    table = _table("left out", "tok/\nstep", "nodes/\nstep", "change", "tool\ncalls", "text")
    for row in rows:
        changes = (_change(row[key]) for key in ("left", "left_tool_calls", "left_text"))
        table.add_row(row["name"], _number(row["tokens_per_step"]), _number(row["draft_tokens_per_step"], 1), *changes)
    return table


def _change(left: float | None) -> str:
    return "–" if left is None else f"{left - 1.0:+.1%}"


def _answers(found: Results) -> str:
    """How many answers repeat others, and how much they repeat themselves."""
    calls, text = (found["kinds"][kind]["repetition"] for kind in ("tool_calls", "text"))
    repeats, own = found["exact_repeats"], found["repetition"]
    return (
        f"Answers found word for word in the pool: {repeats} ({repeats / max(1, found['turns']):.0%}).\n"
        f"Tokens that repeat four tokens of their own answer: {own:.1%} (tool calls {calls:.1%}, text {text:.1%})."
    )


def show_calibration(console: Console, reliability: Mapping[str, Any]) -> None:
    """Print predicted against observed acceptance, in bins."""
    table = Table(title=f"calibration: Brier score {reliability['brier_score']:.4f}")
    for heading in ("predicted", "observed", "candidates"):
        table.add_column(heading, justify="right")
    for row in reliability["bins"]:
        table.add_row(f"{row['predicted']:.3f}", f"{row['observed']:.3f}", str(row["candidates"]))
    console.print(table)


def show_actions(console: Console, found: Mapping[str, Any]) -> None:
    """Print which read-only calls would have been predicted, by tool, and what that would have saved."""
    title = f"{found['answers']} answers, {found['calls']} calls, pool {found['pool']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    for heading in ("read-only tool", "calls", "started", "used", "precision", "recall"):
        table.add_column(heading, justify="left" if heading == "read-only tool" else "right", no_wrap=True)
    for name, row in [*found["tools"].items(), ("all", found)]:
        counts = [str(row[key]) for key in ("read_only_calls", "started", "used")]
        table.add_row(name, *counts, *(_share(row[key]) for key in ("precision", "recall")))
    console.print(table)
    assumed = f"tools of {found['tool_seconds']:g} s and answers of {found['model_seconds']:g} s"
    console.print(f"With {assumed}, {found['seconds_saved']:.0f} s would have been saved.", highlight=False)


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.2f}"
