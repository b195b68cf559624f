"""CompatCanary's probes: they leave temperature and length alone, so a scripted model answers them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients

SCANNER = Path(__file__).parent / "node_modules" / "compatcanary" / "src" / "cli.js"
PROBES = (
    *("models.list", "chat.basic", "chat.streaming", "chat.tool_call", "chat.structured_output"),
    *("responses.basic", "responses.streaming"),
)


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


def test_the_probes(server: Any) -> None:
    found = report(server.url, server.keys["desk"])
    assert set(found) == set(PROBES)
    assert {probe: one for probe, one in found.items() if one["status"] != "pass"} == {}
