"""CompatCanary's probes: they leave temperature and length alone, so a scripted model answers them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients

SCANNER = Path(__file__).parent / "node_modules" / "compatcanary" / "src" / "cli.js"
PROBES = (
    "models.list",
    "chat.basic",
    "chat.streaming",
    "chat.tool_call",
    "chat.structured_output",
    "responses.basic",
    "responses.streaming",
)


@cache
def report(url: str, key: str) -> dict[str, Any]:
    """What the scanner found, by the probe's id."""
    node = shutil.which("node")
    if node is None or not SCANNER.is_file():
        pytest.fail("Node 20 or newer and `npm ci` beside these tests are needed: `make test-clients` does the latter")
    told = ["--base-url", url, "--model", "echo", "--format", "json", "--timeout", "300", "--fail-on", "never"]
    done = subprocess.run(
        [node, str(SCANNER), "scan", *told],
        env={**os.environ, "OPENAI_API_KEY": key}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {found["id"]: found for found in json.loads(done.stdout)["results"]}


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe(server: Any, probe: str) -> None:
    found = report(server.url, server.keys["desk"])[probe]
    assert found["status"] == "pass", found


def test_there_are_no_other_probes(server: Any) -> None:
    assert set(report(server.url, server.keys["desk"])) == set(PROBES)
