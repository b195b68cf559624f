"""`precedent demo --tool-latency`: the order desk with slow reading, with and without tokens and tools ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from precedent.cache import SpeculationCache
from precedent.cli.progress import Progress
from precedent.cli.speedup import Sample, speedup
from precedent_demo.demo_runs import TENANT, rotated
from precedent_run_ahead import RunAheadMiddleware

if TYPE_CHECKING:
    from precedent_demo import Request, Transcript
    from precedent_demo.demo_runs import Bench
    from precedent_demo.demo_state import DemoState

WAYS = {"neither": "plain", "tokens only": "both", "tools only": "plain", "both": "both"}
"""The ways to measure, and the engine of each (`precedent_demo.demo_runs.WAYS`)."""


@dataclass(slots=True)
class ToolRun:
    """One way: the seconds of each request, its transcript, and the tools that ran ahead."""

    ahead: RunAheadMiddleware | None
    seconds: list[float] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)


def middleware(cache: SpeculationCache, *, learns: bool) -> RunAheadMiddleware:
    """Reading tools run ahead; only warming stores what was done, so that no measured request learns from another."""
    from precedent_demo import READ_ONLY, CustomerInTheLoop

    options: dict[str, Any] = {} if learns else {"learn_from": None}
    return RunAheadMiddleware(
        READ_ONLY,
        cache=cache,
        tenant=TENANT,
        arguments_from_tools=READ_ONLY,
        harmless=[CustomerInTheLoop],
        **options,
    )


def warm(bench: Bench, cache: SpeculationCache, state: DemoState, wanted: Sequence[Request], progress: Progress) -> int:
    """Fill the cache with other requests' completions and actions; returns how many requests it holds."""
    from precedent_demo import make_database, run_request

    desk, ahead, done = make_database(seed=0), middleware(cache, learns=True), state.warmed()
    for request in wanted:
        progress.show("warming the cache (set A)", len(done), len(wanted), request.workflow)
        if request.request_id not in done:
            run_request(bench.chat_model(bench.warm_engine), request, desk, middleware=[ahead])
            done.append(request.request_id)
            state.mark_warmed(done)
    return len(done)


def measure(
    bench: Bench, cache: SpeculationCache, wanted: Sequence[Request], latency: float, progress: Progress
) -> dict[str, ToolRun]:
    """Run every request in each way; reading takes `latency` seconds."""
    from precedent_demo import make_database, run_request

    desk = make_database(seed=0)
    runs = {
        name: ToolRun(middleware(cache, learns=False) if "tools" in name or name == "both" else None) for name in WAYS
    }
    for number, request in enumerate(wanted):
        for name in rotated(list(WAYS), number):
            progress.show("measuring (set B)", number, len(wanted), f"{request.workflow}, {name}")
            run, model = runs[name], bench.chat_model(bench.engines[WAYS[name]])
            beside = [] if run.ahead is None else [run.ahead]
            begun = perf_counter()
            said = run_request(model, request, desk, middleware=beside, tool_latency=latency)
            run.seconds.append(perf_counter() - begun)
            run.transcripts.append(said)
    return runs


def results(runs: dict[str, ToolRun], latency: float, machine: dict[str, Any]) -> dict[str, Any]:
    """The JSON of `precedent demo --tool-latency`."""
    return {"tool_latency": latency, "machine": machine, "runs": [_row(name, runs, latency) for name in runs]}


def _row(name: str, runs: dict[str, ToolRun], latency: float) -> dict[str, Any]:
    run, base = runs[name], runs["neither"]
    found = speedup(*([Sample(1, seconds) for seconds in one.seconds] for one in (run, base)))
    same = sum(said(a) == said(b) for a, b in zip(run.transcripts, base.transcripts, strict=True))
    row: dict[str, Any] = {
        "name": name,
        "requests": len(run.seconds),
        "seconds_per_request": round(sum(run.seconds) / len(run.seconds), 3),
        "speedup": round(found.ratio, 3),
        "speedup_interval": found.interval and [round(end, 3) for end in found.interval],
        "equal_transcripts": [same, len(run.seconds)],
        "solved": sum(one.solved_by_model for one in run.transcripts),
    }
    if run.ahead is None:
        return row
    counts = run.ahead.ledger.counts
    reading = counts.calls * latency
    return row | {
        "run_ahead": counts.as_dict(),
        "wasted": counts.started - counts.used,
        "share_of_read_only_calls": round(counts.used / counts.calls, 4) if counts.calls else None,
        "share_of_reading_time_hidden": round(counts.seconds_saved / reading, 4) if reading else None,
    }


def said(transcript: Transcript) -> list[tuple[str, Any, Any]]:
    """What a transcript says: kinds, texts and calls, without ids and figures."""
    return [
        (message.type, message.content, [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())])
        for message in transcript.messages
    ]


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the table and what it says in words."""
    machine, rows = found["machine"], {row["name"]: row for row in found["runs"]}
    setting = f"{machine['target']}, {machine['dtype']}, reading takes {found['tool_latency']:g} s"
    table = Table(title=f"{rows['neither']['requests']} requests\n{setting}", box=box.SIMPLE_HEAD, padding=0)
    for heading in (
        "run",
        "s per\nrequest",
        "speed",
        "used of\nstarted",
        "used of\ncalls",
        "wasted",
        "equal",
        "solved",
    ):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    for row in found["runs"]:
        table.add_row(*_cells(row))
    console.print(table)
    both, tokens = rows["both"], rows["tokens only"]
    less = 1 - both["seconds_per_request"] / tokens["seconds_per_request"]
    hidden, sources = both["share_of_reading_time_hidden"], both["run_ahead"]["by_source"].items()
    by_source = ", ".join(f"{row['used']} of {row['started']} by {name}" for name, row in sources)
    console.print(f"both: {by_source or 'nothing ran ahead'}", highlight=False)
    console.print(
        f"With tools ahead a request takes {less:.0%} less time than with tokens alone"
        + ("." if hidden is None else f"; {hidden:.0%} of the reading time is hidden."),
        highlight=False,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    ahead = row.get("run_ahead")
    return [
        row["name"],
        f"{row['seconds_per_request']:.2f}",
        f"{row['speedup']:.2f}x",
        f"{ahead['used']}/{ahead['started']}" if ahead else "–",
        f"{ahead['used']}/{ahead['calls']}" if ahead else "–",
        str(row["wasted"]) if ahead else "–",
        "{}/{}".format(*row["equal_transcripts"]),
        f"{row['solved']}/{row['requests']}",
    ]
