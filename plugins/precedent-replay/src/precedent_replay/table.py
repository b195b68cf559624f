"""Prints the results of `precedent replay`: a short table and a verdict, or with `--details` all measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from precedent.runtime.machine_load import BUSY_SHARE
from precedent_replay.baselines import PromptLookup

Results = Mapping[str, Any]
Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

FEWEST_TURNS = 20
"""With fewer measured answers, the verdict calls the figures a hint."""

BEST = "* tokens per step divided by those of the best baseline with no more nodes per step"


def show(console: Console, found: Results, *, details: bool) -> None:
    """Print the short table (all tables with `details`), the ablations if there are any, and the verdict."""
    rows = [row for row in found["drafters"] if not row["without"]]
    ablated = [row for row in found["drafters"] if row["without"]]
    title = f"{found['turns']} turns, {found['tokens']} tokens, pool {found['settings']['pool']}"
    if details:
        console.print(_table(title, rows, _overview(found)))
        console.print(_table("tokens per step by kind of turn", rows, _BY_KIND))
    else:
        timed = [("times as\nfast here", _number("speed_on_this_machine"))] if says_speed(found) else []
        short = [("tokens/\nstep", _number("tokens_per_step")), ("vs\nbest*", _number("ratio"))]
        console.print(_table(title, rows, [*short, *timed]))
    if ablated:
        console.print(_table("left out", ablated, _LEFT))
    console.print(f"{BEST}{'' if details else '; --details shows more'}\n", highlight=False, soft_wrap=True)
    console.print(_answers(found), highlight=False)
    console.print(f"\n{verdict(found)}", highlight=False, soft_wrap=True)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), title_justify="left", caption_justify="left")
    table.add_column("drafters", overflow="fold")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["name"], *(cell(row) for _, cell in columns))
    return table


def _number(name: str, digits: int = 2) -> Callable[[Row], str]:
    """A cell of a figure; empty for a ratio of a baseline, a dash for one that is unknown."""

    def cell(row: Row) -> str:
        value = row.get(name, "")
        return value if value == "" else "–" if value is None else f"{value:.{digits}f}"

    return cell


def _of_kind(kind: str, name: str, digits: int = 2) -> Callable[[Row], str]:
    """A cell of a figure by kind of turn; a dash without such turns."""
    return lambda row: _number(name, digits)({name: row["kinds"][kind][name] or None})


def _overview(found: Results) -> list[Column]:
    """Tokens per step, and for each cost curve the tokens per plain step time."""
    by_curve = "tokens_per_plain_step_time_by_curve"
    return [
        ("tok/\nstep", _number("tokens_per_step")),
        ("vs\nbest*", _number("ratio")),
        ("nodes/\nstep", _number("draft_tokens_per_step", 1)),
        *(
            (f"tok/cost\n{curve}", lambda row, curve=curve: f"{row[by_curve][curve]:.2f}")
            for curve in found["settings"]["curves"]
        ),
        ("µs/\nstep", _number("microseconds_per_step", 0)),
        ("p99", _number("microseconds_per_step_p99", 0)),
    ]


_BY_KIND: list[Column] = [
    ("tool\ncalls", _of_kind("tool_calls", "tokens_per_step")),
    ("vs\nbest*", _number("ratio_tool_calls")),
    ("nodes", _of_kind("tool_calls", "draft_tokens_per_step", 1)),
    ("text", _of_kind("text", "tokens_per_step")),
    ("vs\nbest*", _number("ratio_text")),
    ("nodes", _of_kind("text", "draft_tokens_per_step", 1)),
    ("exact\nrepeats", _of_kind("exact_repeats", "tokens_per_step")),
]


def _change(name: str) -> Callable[[Row], str]:
    return lambda row: "–" if row[name] is None else f"{row[name] - 1.0:+.1%}"


_LEFT: list[Column] = [
    ("tok/\nstep", _number("tokens_per_step")),
    ("nodes/\nstep", _number("draft_tokens_per_step", 1)),
    ("change", _change("left")),
    ("tool\ncalls", _change("left_tool_calls")),
    ("text", _change("left_text")),
]


def _answers(found: Results) -> str:
    """How many answers repeat others, and how much they repeat themselves."""
    calls, text = (found["kinds"][kind]["repetition"] for kind in ("tool_calls", "text"))
    repeats, own = found["exact_repeats"], found["repetition"]
    return (
        f"Answers found word for word in the pool: {repeats} ({repeats / max(1, found['turns']):.0%}).\n"
        f"Tokens that repeat four tokens of their own answer: {own:.1%} (tool calls {calls:.1%}, text {text:.1%})."
    )


def verdict(found: Results) -> str:
    """What a log would gain: tokens per step, the ratio to the baselines, and the speed-up if steps were measured."""
    main = next((row for row in found["drafters"] if row["main"]), None)
    if main is None or not found["turns"]:
        return "No answer was measured: nothing can be said."
    parts = [f"Your log: {main['tokens_per_step']:.1f} tokens per step"]
    lookup = next(row for row in found["drafters"] if row["name"] == PromptLookup.name)
    if lookup["tokens_per_step"]:
        times = main["tokens_per_step"] / lookup["tokens_per_step"]
        parts.append(f"{times:.1f} times what prompt lookup reaches")
    if main["ratio"] is not None:
        percent = round((main["ratio"] - 1) * 100)
        than = f"the best baseline that verifies no more ({main['best_baseline']})"
        above = f"{abs(percent)} % {'above' if percent > 0 else 'below'} {than}"
        parts.append(above if percent else f"as much as {than}")
    few = f" Only {found['turns']} answers were measured: take it as a hint." if found["turns"] < FEWEST_TURNS else ""
    return f"{', '.join(parts)}{_speed(found, main)}{few}"


def says_speed(found: Results) -> bool:
    """Whether steps were measured, on a machine that was otherwise idle."""
    measured = found["settings"]["measured"]
    return measured is not None and (measured["others_cpu_share"] or 0.0) <= BUSY_SHARE


def _speed(found: Results, main: Row) -> str:
    measured = found["settings"]["measured"]
    if measured is None:
        return ". How much faster that is depends on what a step costs; --target MODEL measures it on this machine."
    if not says_speed(found):
        busy = f"other programs took {measured['others_cpu_share']:.0%} of the processors while steps were measured"
        return f". How much faster that is cannot be said: {busy} (run it again when they rest)."
    return (
        f"; about {main['speed_on_this_machine']:.1f} times as fast on this machine, by the measured steps of "
        f"{measured['model']}. Reading prompts is not counted."
    )


def show_calibration(console: Console, reliability: Mapping[str, Any]) -> None:
    """Print predicted against observed acceptance, in bins."""
    table = Table(title=f"calibration: Brier score {reliability['brier_score']:.4f}")
    for heading in ("predicted", "observed", "candidates"):
        table.add_column(heading, justify="right")
    for row in reliability["bins"]:
        table.add_row(f"{row['predicted']:.3f}", f"{row['observed']:.3f}", str(row["candidates"]))
    console.print(table)


def show_actions(console: Console, found: Results) -> None:
    """Print which read-only calls would have been predicted, by tool, and what that would have saved."""
    rows = [{"name": name, **row} for name, row in [*found["tools"].items(), ("all", found)]]
    names = {"calls": "read_only_calls", "started": "started", "used": "used"}
    counts = [(heading, _number(name, 0)) for heading, name in names.items()]
    title = f"{found['answers']} answers, {found['calls']} calls, pool {found['pool']}"
    shares = [(name, _number(name)) for name in ("precision", "recall")]
    table = _table(title, rows, [*counts, *shares])
    table.columns[0].header = "read-only tool"
    console.print(table)
    assumed = f"tools of {found['tool_seconds']:g} s and answers of {found['model_seconds']:g} s"
    console.print(f"With {assumed}, {found['seconds_saved']:.0f} s would have been saved.", highlight=False)
