"""Shows the demo's figures: a table, sentences that claim no more than was measured, and a page of coloured answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from precedent.pages.colours import Palette
from precedent.pages.render import Decode, page, pieces
from precedent.runtime.machine_load import BUSY_SHARE

if TYPE_CHECKING:
    from precedent_demo.demo_runs import Run

Results = Mapping[str, Any]

NAMED = ("both", "repeat")
"""The runs whose speed-ups the verdict names."""

NEAR_TIE = 1e-4
"""Below this logit gap, a difference from plain decoding comes from rounding."""

HEADINGS = (
    *("tok/\nstep", "tok/\ns", "decode\nspeed", "request\nspeed"),
    *("prefill\ns", "decode\ns", "requests\ns", "equal", "solved"),
)
"""Seconds are sums over all requests; those of requests count from submission to the last token."""

FEWEST_FOR_INTERVAL = 4
"""Fewest requests for an interval; of fewer, the spread is hardly known."""

REQUESTS_ON_PAGE = 6


def requests(number: int) -> str:
    """A number of requests, in the singular or plural."""
    return "1 request" if number == 1 else f"{number} requests"


def doubts(results: Results) -> list[str]:
    """The reasons not to report a speed-up; empty if there are none."""
    found, number, busy = [], results["runs"][0]["requests"], results["machine"]["others_cpu_share"]
    if number < FEWEST_FOR_INTERVAL:
        verb = "is" if number == 1 else "are"
        found.append(f"{requests(number)} {verb} too few (use --requests {FEWEST_FOR_INTERVAL})")
    if busy is not None and busy > BUSY_SHARE:
        found.append(f"other programs used {busy:.0%} of the CPU meanwhile (run it again on an idle machine)")
    return found


def speed_of(run: Mapping[str, Any], what: str, digits: int = 1) -> str:
    """A speed-up and, if there is one, its interval in brackets."""
    interval = run[f"{what}_speedup_interval"]
    brackets = f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else ""
    return f"{run[f'{what}_speedup']:.{digits}f}{brackets}"


def so_far(runs: Sequence[Mapping[str, Any]], busy: float | None) -> str:
    """One line while the demo measures: the speed-ups after the requests so far, unless other programs disturb them."""
    done = f"after {requests(runs[0]['requests'])}"
    if busy is not None and busy > BUSY_SHARE:
        return f"{done}: no speed-up is shown, other programs use {busy:.0%} of the CPU"
    speeds = [
        f"{run['name']} {speed_of(run, 'decode')} in decoding, {speed_of(run, 'request')} in all"
        for run in runs
        if run["name"] in NAMED
    ]
    return f"{done}, times as fast as plain: {'; '.join(speeds)}"


def verdict(results: Results) -> str:
    """The sentences below the table: tokens per step, the speed-up or why there is none, and the guarantee."""
    runs = {run["name"]: run for run in results["runs"]}
    both, repeat = (runs[name] for name in NAMED)
    steps = (
        f"With a cache warmed by other requests, the model produced {both['tokens_per_step']:.1f} tokens per "
        f"step, and {repeat['tokens_per_step']:.1f} once the cache held these requests too; plain decoding produces 1."
    )
    if reasons := doubts(results):
        speed = f"No speed-up is reported: {' and '.join(reasons)}."
    else:
        decode, whole = (f"{speed_of(both, what)} and {speed_of(repeat, what)}" for what in ("decode", "request"))
        speed = (
            f"Decoding was {decode} times as fast as plain decoding; whole requests, prefill included, {whole} times "
            "(in brackets: 95 % confidence intervals)."
        )
        if results["machine"]["others_cpu_share"] is None:
            speed += " The load from other programs is not known."
    if results["temperature"] > 0:
        promise = "Every answer was sampled from the target model's own output distribution."
    else:
        same, total = results["identical_outputs"]["both"]
        promise = (
            f"{same} of {total} answers were identical to plain decoding; the target model itself chose every token."
        )
    return f"{steps} {speed} {promise}"


def rows(results: Results) -> Iterator[list[str]]:
    """The cells of each run: its name, then one per heading; without speeds if there are doubts about them."""
    comparable = not doubts(results)
    for run in results["runs"]:
        same = results["identical_outputs"].get(run["name"])
        yield [
            run["name"],
            f"{run['tokens_per_step']:.2f}",
            f"{run['tokens_per_second']:.1f}",
            *(f"{run[f'{what}_speedup']:.2f}x" if comparable else "–" for what in ("decode", "request")),
            *(f"{run[f'{what}_seconds']:.1f}" for what in ("prefill", "decode", "request")),
            f"{same[0]}/{same[1]}" if same else "–",
            f"{run['solved']}/{run['requests']}",
        ]


def show(console: Console, results: Results) -> None:
    """Print the table, the accepted tokens by source, the first differences, and the verdict."""
    machine, plain = results["machine"], results["runs"][0]
    setting = f"{machine['target']}, {machine['dtype']}, {machine['device']}, temperature {results['temperature']}"
    title = f"{requests(plain['requests'])}, {plain['tokens']} tokens\n{setting}"
    console.print(table_of(title, HEADINGS, rows(results)))
    for line in (*_sources(results), *_draft_model(results), *_differences(results)):
        console.print(line, highlight=False)
    console.print(f"\n{verdict(results)}", soft_wrap=True, highlight=False)


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column names the run."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _sources(results: Results) -> Iterator[str]:
    """For each run that drafted: how many tokens were accepted, and which drafters had proposed them."""
    for run in results["runs"]:
        if run["num_draft_tokens"]:
            found = ", ".join(f"{count} by {source}" for source, count in run["accepted_by_source"].items())
            counts = f"{run['num_accepted_tokens']} of {run['num_draft_tokens']} drafted tokens accepted"
            yield f"{run['name']}: {counts}{f' ({found})' if found else ''}"


def _draft_model(results: Results) -> Iterator[str]:
    """What the draft model brings beside the cache."""
    if not doubts(results):
        yield f"both against cache-only: {speed_of(results['both_over_cache'], 'decode', 2)} times as fast in decoding"


def _differences(results: Results) -> Iterator[str]:
    for one in results["first_differences"]:
        kind = "near-tie" if one["logit_gap"] < NEAR_TIE else "difference"
        place = f"{one['run']}, request {one['request']}, token {one['position']}"
        yield f"{kind}: {place}: the two tokens' logits differ by {one['logit_gap']:.2g}"


def demo_page(results: Results, runs: Mapping[str, Run], decode: Decode) -> str:
    """The HTML document: model, machine, table, legend, and the answers of some requests."""
    machine, plain, busy = results["machine"], results["runs"][0], results["machine"]["others_cpu_share"]
    parts = machine["processor"], machine["device"], f"{machine['threads']} threads", f"torch {machine['torch']}"
    facts = {
        "model": f"{machine['target']}, {machine['dtype']}",
        "draft model": machine["draft_model"],
        "other draft model": machine.get("other_draft_model"),
        "machine": ", ".join(parts),
        "other programs": "not known" if busy is None else f"used {busy:.0%} of the CPU during the measurement",
        "temperature": f"{results['temperature']:g}{' (greedy)' if results['temperature'] == 0 else ''}",
        "measured": f"{requests(plain['requests'])} per run; plain decoding wrote {plain['tokens']} tokens",
    }
    answers = {name: [[turn.result for turn in turns] for turns in run.requests] for name, run in runs.items()}
    counts = Counter(source for all_ in answers.values() for turns in all_ for turn in turns for source in turn.sources)
    palette = Palette()
    return page(
        "demo.html.jinja",
        title="Where the tokens came from",
        verdict=verdict(results),
        facts=[(name, fact) for name, fact in facts.items() if fact is not None],
        headings=("run", *(heading.replace("\n", " ") for heading in HEADINGS)),
        rows=list(rows(results)),
        legend=palette.legend(counts),
        counts=counts,
        runs=[
            {
                "name": name,
                "note": f"{run.as_dict()['tokens_per_step']:.1f} tokens per step",
                "requests": [
                    [pieces(turn.token_ids, turn.sources, decode, palette) for turn in turns]
                    for turns in answers[name][:REQUESTS_ON_PAGE]
                ],
                "open": name == "both",
            }
            for name, run in runs.items()
        ],
    )
