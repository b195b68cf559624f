"""CompatCanary's probes against `precedent serve` with the packaged model."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients

SCANNER = Path(__file__).parent / "node_modules" / "compatcanary" / "src" / "cli.js"
PROBES = ("models", "chat-basic", "chat-streaming", "tool-calling", "structured-output", "responses-basic", "responses-streaming")


@cache
def report(url: str) -> dict[str, Any]:
    """What the scanner found, by the probe's id."""
    node = shutil.which("node")
    if node is None or not SCANNER.is_file():
        pytest.fail("Node 20 or newer and `npm ci` in tests/clients are needed: `make test-clients` does the latter")
    told = ["--base-url", url, "--model", "smollm2", "--format", "json", "--timeout", "300", "--fail-on", "never"]
    done = subprocess.run([node, str(SCANNER), "scan", *told], capture_output=True, text=True, check=True)
    return {found["id"]: found for found in json.loads(done.stdout)["results"]}


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe(smol: Any, probe: str) -> None:
    found = report(smol.url)[probe]
    assert found["status"] == "pass", found


def test_there_are_no_other_probes(smol: Any) -> None:
    assert set(report(smol.url)) == set(PROBES)
