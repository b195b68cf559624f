"""LangChain's own tests of agents, out of its sdist, with `RunAheadMiddleware` in every agent.

They run three times: with a middleware of the same hooks that does nothing, with ours, and with ours and predictions of
the calls that the first time saw. Every test must end as it did the first time. (With any `wrap_tool_call` LangChain
leaves out some checks and draws another graph, so some of its tests fail the first time already.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.agents

Ran = Callable[[str], dict[str, Any]]

FOLDER = Path(os.environ.get("PRECEDENT_LANGCHAIN", str(Path(sys.prefix) / "langchain")))
COUNTS_ITS_CALLS = {
    "tests/unit_tests/agents/middleware/implementations/test_tool_retry.py::test_tool_retry_custom_exception_filter"
}
"""Its tool counts how often it is called, and fails: it does not only read. The call that failed ahead is one more."""


@cache
def sources() -> Path:
    """LangChain's sdist of the installed version, unpacked."""
    packed = sorted(FOLDER.glob("langchain-*.tar.gz"))
    if not packed:
        pytest.fail("`make test-agents` fetches LangChain's sources")
    with tarfile.open(packed[-1]) as archive:
        archive.extractall(FOLDER, filter="data")
    return packed[-1].with_name(packed[-1].name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Ran:
    """What became of each test, and how much ran ahead; each way runs once, and its counts are printed."""
    terminal = request.config.pluginmanager.getplugin("terminalreporter")

    @cache
    def run(ahead: str) -> dict[str, Any]:
        found = outcomes_of(ahead)
        counts = ", ".join(f"{number} {outcome}" for outcome, number in Counter(found["tests"].values()).items())
        terminal.write_line(f"{ahead}: {counts}; {found['started']} calls ran ahead, {found['used']} results were used")
        return found

    return run


def outcomes_of(ahead: str) -> dict[str, Any]:
    """Run LangChain's tests once."""
    folder, outcomes = sources(), FOLDER / f"{ahead}.json"
    outcomes.unlink(missing_ok=True)  # an earlier run's must not stand in for one that breaks off
    pytest_of_theirs = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "ahead_everywhere"]
    settings = ("--ahead", ahead, "--calls", str(FOLDER / "asked.json"), "--outcomes", str(outcomes))
    subprocess.run(
        [*pytest_of_theirs, *settings, "tests/unit_tests/agents"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, timeout=900, check=False,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(outcomes.read_text())
    return found


def test_without_predictions_every_test_ends_as_with_a_middleware_that_does_nothing(ran: Ran) -> None:
    idle, ours = ran("idle")["tests"], ran("nothing")
    assert sum(outcome == "passed" for outcome in idle.values()) > 1000
    assert ours["agents"] > 400
    assert ours["tests"] == idle


def test_with_predictions_as_well(ran: Ran) -> None:
    idle, ours = ran("idle")["tests"], ran("calls")
    assert ours["used"] >= 50, "hardly anything ran ahead, so this shows little"
    other = {test: outcome for test, outcome in ours["tests"].items() if outcome != idle[test]}
    assert set(other) <= COUNTS_ITS_CALLS
    assert ours["tests"].keys() == idle.keys()
