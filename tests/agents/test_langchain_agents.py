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
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.agents

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


@cache
def ran(ahead: str) -> dict[str, Any]:
    """What became of each test, and how much ran ahead."""
    folder = sources()
    settings = ("--ahead", ahead, "--calls", str(FOLDER / "calls.json"), "--outcomes", str(FOLDER / f"{ahead}.json"))
    plugin = {"PYTHONPATH": str(Path(__file__).parent)}
    pytest_of_theirs = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "ahead_everywhere"]
    subprocess.run(
        [*pytest_of_theirs, *settings, "tests/unit_tests/agents"],
        cwd=folder, env={**os.environ, **plugin}, timeout=900, check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((FOLDER / f"{ahead}.json").read_text())
    return found


def test_without_predictions_every_test_ends_as_with_a_middleware_that_does_nothing() -> None:
    idle, ours = ran("idle")["tests"], ran("nothing")
    assert sum(outcome == "passed" for outcome in idle.values()) > 1000
    assert ours["agents"] > 400
    assert ours["tests"] == idle


def test_with_predictions_as_well() -> None:
    idle, ours = ran("idle")["tests"], ran("calls")
    assert ours["used"] >= 50, "hardly anything ran ahead, so this shows little"
    other = {test: outcome for test, outcome in ours["tests"].items() if outcome != idle[test]}
    assert set(other) <= COUNTS_ITS_CALLS
    assert ours["tests"].keys() == idle.keys()
