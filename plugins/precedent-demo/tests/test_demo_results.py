"""What the demo makes of its figures: a table, sentences that claim no more than was measured, and a page to show."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from precedent import DRAFTERS
from precedent.decoding.stats import GenerationStats
from precedent.drafters import known_drafters
from precedent.engine.generation import GenerationResult
from precedent.pages.colours import OTHERS, SOURCES
from precedent.runtime.machine_load import BUSY_SHARE
from precedent_demo.demo_report import FEWEST_FOR_INTERVAL, HEADINGS, demo_page, doubts, rows, show, verdict
from precedent_demo.demo_runs import WAYS, Run, Turn, ways_of, with_speedups

NAMES = [way.name for way in WAYS]


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


def test_another_draft_model_is_measured_beside_the_first() -> None:
    names = [way.name for way in ways_of(0.0, False, other_draft=True)]
    assert names[len(NAMES) :] == ["draft-only, other", "both, other"]


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
