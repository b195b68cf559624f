"""Hostile requests leave a server as it was; ten thousand of them in `make test-stress`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.forked import run

PROGRAM = Path(__file__).parent / "hostile_requests.py"


@pytest.mark.parametrize("number", [100, pytest.param(10_000, marks=pytest.mark.stress)])
def test_a_server_under_fire(number: int) -> None:
    """In a process of its own, which may use sockets and whose threads and open files can be counted."""
    done = run([PROGRAM, number])
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    print(done.stdout)
    assert sum(told["ended"].values()) == number
    if number > 1000:  # a few first long bodies raise the level of a short run
        assert told["mebibytes"][-1] <= told["mebibytes"][4] * 1.05
