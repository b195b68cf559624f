"""Programs end by themselves, and forked processes refuse or work: no waiting for threads that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.forked import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")

FAST = {
    "ends_while_the_embedder_is_loaded": 0,
    "ends_by_sys_exit_while_a_task_loads": 3,
    "an_engine_refuses_in_a_fork": 0,
    "a_cache_refuses_in_a_fork": 0,
    "a_model_that_was_not_loaded_works_in_a_fork": 0,
    "no_request_waits_for_a_compiler": 0,
}
"""Scenarios of `scenarios.py`, which assert, and the statuses with which they end."""

SLOW = {
    "ends_with_an_abandoned_stream": 0,
    "ends_by_an_exception": 1,
    "a_chat_model_refuses_in_a_fork": 0,
    "a_fork_amid_computing_refuses_to_compute": 0,
    "a_fork_beside_a_busy_engine_works": 0,
    "children_that_end_leave_their_parent_whole": 0,
    "a_file_that_is_open_is_not_opened_in_a_fork": 0,
    "an_embedder_goes_on_in_a_fork": 0,
    "a_spawned_process_loads_its_own": 0,
}


def check(statuses: dict[str, int]) -> None:
    """Run scenarios, one after the other, forked from one process."""
    done = run([Path(__file__).with_name("scenarios.py"), *statuses])
    assert dict(json.loads(line) for line in done.stdout.splitlines()) == statuses, done.stderr
    assert "AssertionError" not in done.stderr


def test_programs_end_and_forks_refuse_or_work() -> None:
    check(FAST)


@pytest.mark.slow
def test_programs_end_and_forks_refuse_or_work_whatever_still_runs() -> None:
    check(SLOW)
