"""kill -9 at random moments of four processes that read and write one cache: nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def crashed(folder: Path, kills: int) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("NUMBA_BOUNDSCHECK", None)
    script = Path(__file__).with_name("crashing_store.py")
    command = [sys.executable, str(script), str(folder), str(kills), "7"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout.splitlines()[-1])
    print(counts)
    return counts


def test_a_few_kills_lose_nothing(tmp_path):
    counts = crashed(tmp_path, 12)
    assert counts["kills"] == 12
    assert counts["acknowledged"] > 0


@pytest.mark.stress
def test_a_thousand_kills_lose_nothing(tmp_path):
    counts = crashed(tmp_path, 1000)
    assert counts["kills"] == 1000
    assert counts["acknowledged"] > 1000
