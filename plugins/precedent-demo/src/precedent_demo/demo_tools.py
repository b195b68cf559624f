"""`precedent demo --tool-latency`: the order desk with slow reading, with and without tokens and tools ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from precedent.cli.options import write_json
from precedent.cli.progress import Progress
from precedent_demo import READ_ONLY, CustomerInTheLoop, Request, Transcript, make_database, make_requests, run_request
from precedent_demo.demo import Asked
from precedent_demo.demo_report import table_of
from precedent_demo.demo_runs import TENANT, Bench, Sample, loaded, rotated, speedup_keys, warm
from precedent_run_ahead import RunAheadMiddleware

WAYS = {"neither": "plain", "tokens only": "both", "tools only": "plain", "both": "both"}
"""The ways to measure, and the engine of each (`precedent_demo.demo_runs.WAYS`)."""

HEADINGS = ("s per\nrequest", "speed", "used of\nstarted", "used of\ncalls", "wasted", "equal", "solved")


@dataclass(slots=True)
class ToolRun:
    """One way: the seconds of each request, its transcript, and the tools that ran ahead."""

    ahead: RunAheadMiddleware | None
    seconds: list[float] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)


def run_with_slow_tools(asked: Asked, progress: Progress, json_file: Path | None) -> None:
    """Warm, measure and show; in float32 unless a precision was asked for, so that every way says the same."""
    bench, state, _ = loaded(replace(asked, dtype=asked.dtype or "float32"), progress, ("plain", "both"))
    with closing(bench):
        others, own = (make_requests(name, full=asked.full, seed=0) for name in ("A", "B"))
        latency = asked.tool_latency or 0.0
        warm(bench, state, others, progress, middleware=[_middleware(bench)])
        runs = _measure(bench, own[: asked.requests], latency, progress)
        found = results(runs, latency, bench.machine())
        progress.rest()
        show(Console(), found)
        write_json(json_file, found)


def _middleware(bench: Bench, **options: Any) -> RunAheadMiddleware:
    """Reading tools run ahead; only warming stores what was done, so that no measured request learns from another."""
    own = {"tenant": TENANT, "arguments_from_tools": READ_ONLY, "harmless": [CustomerInTheLoop]}
    return RunAheadMiddleware(READ_ONLY, cache=bench.warm_cache, **own, **options)


def _measure(bench: Bench, wanted: Sequence[Request], latency: float, progress: Progress) -> dict[str, ToolRun]:
    desk, with_tools = make_database(seed=0), ("tools only", "both")
    runs = {name: ToolRun(_middleware(bench, learn_from=None) if name in with_tools else None) for name in WAYS}
    for number, request in enumerate(wanted):
        for name in rotated(list(WAYS), number):
            progress.show("measuring (set B)", number, len(wanted), f"{request.workflow}, {name}")
            run, model = runs[name], bench.chat_model(bench.engines[WAYS[name]])
            ahead = [] if run.ahead is None else [run.ahead]
            begun = perf_counter()
            transcript = run_request(model, request, desk, middleware=ahead, tool_latency=latency)
            run.seconds.append(perf_counter() - begun)
            run.transcripts.append(transcript)
    return runs


def results(runs: Mapping[str, ToolRun], latency: float, machine: dict[str, Any]) -> dict[str, Any]:
    """The JSON of `precedent demo --tool-latency`."""
    base = runs["neither"]
    rows = [_row(name, run, base, latency) for name, run in runs.items()]
    return {"tool_latency": latency, "machine": machine, "runs": rows}


def _row(name: str, run: ToolRun, base: ToolRun, latency: float) -> dict[str, Any]:
    same = sum(_said(a) == _said(b) for a, b in zip(run.transcripts, base.transcripts, strict=True))
    row: dict[str, Any] = {
        "name": name,
        "requests": len(run.seconds),
        "seconds_per_request": round(sum(run.seconds) / len(run.seconds), 3),
        **speedup_keys("speedup", *([Sample(1, seconds) for seconds in one.seconds] for one in (run, base))),
        "equal_transcripts": [same, len(run.seconds)],
        "solved": sum(one.solved_by_model for one in run.transcripts),
    }
    if run.ahead is None:
        return row
    counts = run.ahead.ledger.counts
    reading = counts.calls * latency
    return row | {
        "run_ahead": asdict(counts)
        | {
            "seconds_saved": round(counts.seconds_saved, 3),
            "precision": round(counts.used / counts.started, 4) if counts.started else None,
            "by_source": {name: {"started": row[0], "used": row[1]} for name, row in counts.by_source.items()},
        },
        "wasted": counts.started - counts.used,
        "share_of_read_only_calls": round(counts.used / counts.calls, 4) if counts.calls else None,
        "share_of_reading_time_hidden": round(counts.seconds_saved / reading, 4) if reading else None,
    }


def _said(transcript: Transcript) -> list[tuple[str, Any, Any]]:
    """What a transcript says: kinds, texts and calls, without ids and figures."""
    return [
        (message.type, message.content, [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())])
        for message in transcript.messages
    ]


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the table and what it says in words."""
    machine, rows = found["machine"], {row["name"]: row for row in found["runs"]}
    setting = f"{machine['target']}, {machine['dtype']}, reading takes {found['tool_latency']:g} s"
    title = f"{rows['neither']['requests']} requests\n{setting}"
    console.print(table_of(title, HEADINGS, map(_cells, found["runs"])))
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
    ahead, (same, of) = row.get("run_ahead"), row["equal_transcripts"]
    used = (f"{ahead['used']}/{ahead['started']}", f"{ahead['used']}/{ahead['calls']}") if ahead else ("–", "–")
    times = f"{row['seconds_per_request']:.2f}", f"{row['speedup']:.2f}x"
    outcome = f"{same}/{of}", f"{row['solved']}/{row['requests']}"
    return [row["name"], *times, *used, str(row.get("wasted", "–")), *outcome]
