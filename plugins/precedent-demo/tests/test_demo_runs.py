"""What the demo measures, for how long, how many times as fast one way is as another, and what it makes of that."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import precedent
from helpers.golden import Golden, shape
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from rich.console import Console
from scipy.stats import t as student

from precedent import DRAFTERS
from precedent.cli.progress import Progress
from precedent.decoding.stats import GenerationStats
from precedent.drafters import known_drafters
from precedent.engine.generation import GenerationResult
from precedent.pages.colours import OTHERS, SOURCES
from precedent.runtime.machine_load import BUSY_SHARE
from precedent_demo import demo_tools, make_requests
from precedent_demo.demo_report import FEWEST_FOR_INTERVAL, HEADINGS, demo_page, doubts, rows, show, verdict
from precedent_demo.demo_runs import (
    FEWEST_WARMED,
    MEASURING_SECONDS,
    WAYS,
    DemoState,
    Run,
    Sample,
    Turn,
    enough,
    measure,
    results_of,
    speedup,
    student_quantile,
    warm,
    ways_of,
    with_speedups,
)
from precedent_demo.demo_tools import ToolRun
from precedent_run_ahead import RunAheadMiddleware

NAMES = [way.name for way in WAYS]


@dataclass
class ScriptedBench:
    """Every way answers each request alike, plain in twice the time."""

    engines: dict[str, None] = field(default_factory=lambda: dict.fromkeys(NAMES))
    runs: dict[str, Run] = field(default_factory=lambda: {name: Run(name) for name in NAMES})
    warmed: list[str] = field(default_factory=list)

    def measure(self, request: Any, desk: Any, name: str) -> None:
        seconds = 2.0 if name == "plain" else 1.0
        stats = GenerationStats(num_steps=9, num_output_tokens=100, decode_seconds=seconds, total_seconds=seconds)
        self.runs[name].requests.append([Turn((1,), GenerationResult("", (1,), ("target",), "stop", 1, 0, stats))])

    def warm(self, request: Any, desk: Any, middleware: Any) -> None:
        self.warmed.append(request.request_id)


@pytest.mark.parametrize(("adaptive", "number"), [(True, FEWEST_FOR_INTERVAL), (False, 6)])
def test_measuring_ends_once_the_intervals_are_narrow_or_with_the_requests(adaptive: bool, number: int) -> None:
    bench: Any = ScriptedBench()
    measure(bench, make_requests("B")[:6], Progress(), adaptive=adaptive)
    assert {len(run.requests) for run in bench.runs.values()} == {number}


@pytest.mark.parametrize(
    ("requests", "interval", "seconds", "stops"),
    [
        (4, [1.9, 2.2], 1, True),
        (4, [1.7, 2.3], 1, False),
        (4, [1.7, 2.3], MEASURING_SECONDS, True),
        (3, None, MEASURING_SECONDS, False),
        (3, None, 2 * MEASURING_SECONDS, True),
    ],
)
def test_it_lasts_until_the_verdict_is_sure_or_the_time_over(
    requests: int, interval: Any, seconds: float, stops: bool
) -> None:
    narrow = {"decode_speedup": 2.0, "request_speedup": 2.0, "request_speedup_interval": [2.0, 2.0]}
    runs = [narrow | {"name": name, "requests": requests, "decode_speedup_interval": interval} for name in NAMES]
    assert enough(runs, seconds) is stops


def test_a_second_demo_warms_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted, state = make_requests("A")[:10], DemoState("m")
    first, second, third = (ScriptedBench() for _ in range(3))
    assert warm(first, state, wanted, Progress(), seconds=-1) == FEWEST_WARMED  # type: ignore[arg-type]
    assert warm(second, DemoState("m"), wanted, Progress(), seconds=inf) == 10  # type: ignore[arg-type]
    assert first.warmed + second.warmed == [request.request_id for request in wanted]
    assert DemoState("another").warmed() == []
    next(tmp_path.rglob("warmed.json")).write_text("[")
    warm(third, state, wanted, Progress())  # type: ignore[arg-type]
    assert len(third.warmed) == 10, "a list that cannot be read is begun again"


SAMPLES = st.builds(Sample, st.integers(1, 500), st.floats(1e-3, 1e3))


@pytest.mark.parametrize("degrees", [3, 5, 14, 1000])
def test_quantiles_are_those_of_the_t_distribution(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(student.ppf(0.975, degrees), rel=0.01)


def test_the_ratio_is_that_of_the_totals_and_few_requests_have_no_interval() -> None:
    ratio, interval = speedup([Sample(10, 1.0), Sample(30, 1.0)], [Sample(10, 4.0), Sample(10, 4.0)])
    assert (ratio, interval) == (pytest.approx((40 / 2) / (20 / 8)), None)
    nothing, something = [Sample(0, 0.0)] * 5, [Sample(5, 1.0)] * 5
    assert speedup(nothing, something) == speedup(something, nothing) == (0.0, None)


@given(st.lists(SAMPLES, min_size=FEWEST_FOR_INTERVAL, max_size=12), st.floats(0.1, 10))
def test_long_and_short_requests_leave_no_doubt_where_each_gains_alike(plain: list[Sample], factor: float) -> None:
    _, interval = speedup([Sample(one.tokens, one.seconds / factor) for one in plain], plain)
    assert interval == pytest.approx((factor, factor))


@pytest.mark.parametrize("number", [4, 12])
def test_nineteen_of_twenty_intervals_hold_the_truth(number: int) -> None:
    chance, held, rounds = random.Random(number), 0, 1500
    for _ in range(rounds):
        sizes = [chance.randint(60, 200) for _ in range(number)]
        plain = [Sample(size, size * exp(chance.gauss(0, 0.05))) for size in sizes]
        mine = [Sample(size, size / 2 * exp(chance.gauss(0, 0.2))) for size in sizes]
        low, high = speedup(mine, plain)[1] or (0.0, 0.0)
        held += low <= 2 * exp((0.05**2 - 0.2**2) / 2) <= high
    assert 0.91 < held / rounds < 0.98


# What the demo makes of its figures: a table, sentences that claim no more than was measured, and a page to show


def run(name: str, requests: int, speed: float, tokens_per_step: float) -> dict[str, Any]:
    found = Run(name).as_dict()
    found |= {"requests": requests, "tokens": 500, "tokens_per_second": speed, "tokens_per_step": tokens_per_step}
    for what, ratio in (("decode", speed / 25), ("request", speed / 50 + 0.5)):
        interval = [0.9 * ratio, 1.1 * ratio] if requests >= FEWEST_FOR_INTERVAL else None
        found |= {f"{what}_speedup": ratio, f"{what}_speedup_interval": interval}
    return found | {"num_draft_tokens": 9, "num_accepted_tokens": 5, "accepted_by_source": {"recall": 5}}


def results(requests: int = 10, busy: float | None = 0.0, temperature: float = 0.0) -> dict[str, Any]:
    """Figures as the demo collects them: `both` is 1.6 times as fast as plain, `repeat` 5.2 times."""
    figures = zip(NAMES, (25.0, 20.0, 30.0, 40.0, 130.0), (1.0, 4.2, 4.0, 4.3, 11.1), strict=True)
    machine = {"target": "desk", "dtype": "bfloat16", "device": "cpu", "processor": "Some CPU", "threads": 2}
    machine |= {"torch": "2.13", "draft_model": "first-layers:4", "others_cpu_share": busy}
    return {
        "temperature": temperature,
        "machine": machine,
        "runs": [run(name, requests, speed, tokens) for name, speed, tokens in figures],
        "identical_outputs": {} if temperature else {name: [requests, requests] for name in NAMES[1:]},
        "first_differences": [],
        "both_over_cache": {"decode_speedup": 1.333, "decode_speedup_interval": [1.241, 1.429]},
    }


def printed(found: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(console, found)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tokens_per_step_come_first_and_speed_after_them() -> None:
    assert verdict(results()) == (
        "With a cache warmed by other requests, the model produced 4.3 tokens per step, and 11.1 once the cache held "
        "these requests too; plain decoding produces 1. Decoding was 1.6 (1.4 to 1.8) and 5.2 (4.7 to 5.7) times as "
        "fast as plain decoding; whole requests, prefill included, 1.3 (1.2 to 1.4) and 3.1 (2.8 to 3.4) times (in "
        "brackets: 95 % confidence intervals). "
        "10 of 10 answers were identical to plain decoding; the target model itself chose every token."
    )
    assert HEADINGS[0].startswith("tok/\nstep")


def test_what_the_draft_model_brings_beside_the_cache_is_said_with_its_interval() -> None:
    assert "both against cache-only: 1.33 (1.24 to 1.43) times as fast in decoding" in printed(results())


@given(st.integers(1, 40), st.none() | st.floats(0, 1))
def test_speed_is_said_only_of_enough_requests_on_a_machine_that_rests(requests: int, busy: float | None) -> None:
    found = results(requests, busy)
    can_be_said = requests >= FEWEST_FOR_INTERVAL and (busy is None or busy <= BUSY_SHARE)
    assert (doubts(found) == []) == can_be_said
    text = printed(found)
    assert ("times as fast" in text) == can_be_said
    assert bool(re.search(r"\d\.\d+x", text)) == can_be_said
    assert ("No speed-up is reported" in text) == (not can_be_said)


def test_the_memory_alone_is_measured_in_full() -> None:
    (alone,) = set(ways_of(0.0, full=True)) - set(ways_of(0.0, full=False))
    assert (alone.name, alone.drafters, alone.cache) == ("recall-only", ("recall",), "A")
    assert [way.name for way in ways_of(0.0, full=False)] == NAMES
    assert "both, topdown" in [way.name for way in ways_of(0.7, full=False)]
    with_another = [way.name for way in ways_of(0.0, False, other_draft=True)]
    assert with_another[len(NAMES) :] == ["draft-only, other", "both, other"]
    stored = [way.name for way in ways_of(0.0, False, stored=True)]
    assert stored[len(NAMES) :] == ["plain, bfloat16", "both, bfloat16"]


def turn(sources: Sequence[str]) -> Turn:
    stats = GenerationStats(num_steps=1, num_output_tokens=len(sources))
    return Turn((1,), GenerationResult("", tuple(range(len(sources))), tuple(sources), "stop", 1, 0, stats))


def page_of(sources: Sequence[str], decode: Any = lambda ids: "".join(f"<{token}>" for token in ids)) -> str:
    runs = {name: Run(name, requests=[[turn(sources)], [turn(sources)]]) for name in NAMES}
    return demo_page(results(), runs, decode)


def test_every_source_is_in_the_legend_in_the_colour_of_its_tokens() -> None:
    sources = (*SOURCES, "somebody-else")
    page = page_of(sources)
    legend = dict(re.findall(r'<b style="([^"]*)">([^<]*)</b>', page))
    assert sorted(legend.values()) == sorted(sources)
    shown = set(re.findall(r'<span style="([^"]*)" title="([^"]*)"', page))
    assert shown == set(legend.items())


def test_what_a_model_wrote_is_text_on_the_page() -> None:
    page = page_of(("recall",), lambda ids: "<script>alert(1)</script>")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_every_drafter_of_the_library_has_a_colour_of_its_own() -> None:
    assert {"target", *known_drafters()} - DRAFTERS.keys() <= SOURCES.keys()
    colours = [*SOURCES.values(), *OTHERS]
    assert len({colour.page for colour in colours}) == len({colour.terminal for colour in colours}) == len(colours)


def test_whole_requests_stand_beside_decoding_in_table_page_and_json() -> None:
    requests = [[turn(["target"]), turn(["target"])], [turn(["recall"])]]
    runs = {name: Run(name, requests) for name in NAMES}
    for number, stats in enumerate(turn.result.stats for turns in requests for turn in turns):
        stats.decode_seconds, stats.total_seconds = 1.0 + number, 2.0 + number
    found = with_speedups(runs)[0]
    assert (found["decode_seconds"], found["request_seconds"]) == (6.0, 9.0)
    assert found["decode_speedup"] == found["request_speedup"] == 1.0
    assert found["decode_speedup_interval"] is None
    assert {"request\nspeed", "requests\ns"} <= set(HEADINGS)
    both = next(row for row in rows(results()) if row[0] == "both")
    assert both[1 + HEADINGS.index("decode\nspeed")] == "1.60x"
    assert both[1 + HEADINGS.index("request\nspeed")] == "1.30x"
    assert {"1.60x", "1.30x"} <= set(re.findall("<td[^>]*>([^<]*)</td>", page_of(("target",))))


def test_the_table_fits_into_a_terminal_of_eighty_columns() -> None:
    console, found = Console(file=io.StringIO(), width=80), results(requests=40, temperature=0.7)
    longest = {"name": "both, topdown", "prefill_seconds": 118.9, "decode_seconds": 1122.5, "request_seconds": 1241.4}
    found["runs"].append(found["runs"][-1] | longest)
    show(console, found)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "…" not in "".join(lines)
    assert any(line.split()[:2] == ["both,", "topdown"] and line.rstrip().endswith("0/40") for line in lines)


# `precedent demo --tool-latency`: slow reading, four ways, one screen


class Said:
    """A transcript of one answer."""

    solved_by_model = True

    def __init__(self, text: str) -> None:
        self.messages = (HumanMessage("hi"), AIMessage(text))


def run_of(seconds: float, text: str = "hello", *, ahead: bool = False) -> ToolRun:
    middleware = RunAheadMiddleware() if ahead else None
    if middleware is not None:
        counts = middleware.ledger.counts
        counts.calls, counts.started, counts.used, counts.seconds_saved = 4, 3, 2, 0.8
        counts.by_source["memory"] = [3, 2]
    return ToolRun(middleware, [seconds, seconds], [Said(text), Said(text)])  # type: ignore[list-item]


def found() -> dict[str, Any]:
    each = (run_of(4), run_of(2), run_of(3, ahead=True), run_of(1.5, "other", ahead=True))
    machine = {"target": "a model", "dtype": "float32"}
    return demo_tools.results(dict(zip(demo_tools.WAYS, each, strict=True)), 0.4, machine)


def test_the_results_say_what_was_used_hidden_and_equal() -> None:
    rows = {row["name"]: row for row in found()["runs"]}
    assert [row["speedup"] for row in rows.values()] == pytest.approx([1.0, 2.0, 4 / 3, 8 / 3], abs=1e-3)
    assert rows["tools only"]["equal_transcripts"] == [2, 2]
    assert rows["both"]["equal_transcripts"] == [0, 2]
    assert (rows["both"]["wasted"], rows["both"]["share_of_read_only_calls"]) == (1, 0.5)
    assert rows["both"]["share_of_reading_time_hidden"] == pytest.approx(0.5)
    console = Console(width=80, record=True, file=io.StringIO())
    demo_tools.show(console, found())
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert "25% less time" in " ".join(lines)


class Differing(ScriptedBench):
    """What `both` says differs in its first token."""

    def measure(self, request: Any, desk: Any, name: str) -> None:
        super().measure(request, desk, name)
        if name == "both":
            said = self.runs[name].requests[-1][0].result
            self.runs[name].requests[-1] = [Turn((1,), replace(said, token_ids=(2,)))]

    def logit_gap(self, context: Sequence[int], token: int, other: int) -> float:
        return 0.25


def test_the_json_has_the_recorded_keys(golden: Golden) -> None:
    bench = Differing()
    for name in NAMES * FEWEST_FOR_INTERVAL:
        bench.measure(None, None, name)
    demo = results_of(bench, 0.0, {"target": "desk"}, 2)  # type: ignore[arg-type]
    golden("transcripts/commands-demo", {"demo": shape(demo), "demo --tool-latency": shape(found())})


@pytest.mark.parametrize("other", [["--temperature", "1"], ["--html", "page.html"]])
def test_what_cannot_be_compared_is_refused(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert precedent("demo", "--tool-latency", 0.4, *other) == 2
    assert other[0] in capsys.readouterr().err
