"""`precedent demo --tool-latency`: slow reading, four ways, one screen."""

from __future__ import annotations

import io
from typing import Any

import pytest
from helpers.command_line import precedent
from langchain_core.messages import AIMessage, HumanMessage
from rich.console import Console

from precedent_demo.demo_tools import WAYS, ToolRun, results, show
from precedent_run_ahead import RunAheadMiddleware


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
    runs = dict(zip(WAYS, (run_of(4), run_of(2), run_of(3, ahead=True), run_of(1.5, "other", ahead=True)), strict=True))
    return results(runs, 0.4, {"target": "a model", "dtype": "float32"})


def test_the_results_say_what_was_used_hidden_and_equal() -> None:
    rows = {row["name"]: row for row in found()["runs"]}
    assert [row["speedup"] for row in rows.values()] == pytest.approx([1.0, 2.0, 4 / 3, 8 / 3], abs=1e-3)
    assert rows["tools only"]["equal_transcripts"] == [2, 2]
    assert rows["both"]["equal_transcripts"] == [0, 2]
    assert (rows["both"]["wasted"], rows["both"]["share_of_read_only_calls"]) == (1, 0.5)
    assert rows["both"]["share_of_reading_time_hidden"] == pytest.approx(0.5)
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, found())
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert "25% less time" in " ".join(lines)


@pytest.mark.parametrize("other", [["--temperature", "1"], ["--html", "page.html"]])
def test_what_cannot_be_compared_is_refused(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert precedent("demo", "--tool-latency", 0.4, *other) == 2
    assert other[0] in capsys.readouterr().err
