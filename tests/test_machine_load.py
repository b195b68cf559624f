"""What other programs take of the processors: from counters written here, and from a program that does compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precedent.runtime.machine_load import CpuTimes, cpu_times, share_of_others

TICKS = os.sysconf("SC_CLK_TCK")


def test_the_share_is_what_others_worked_of_all_that_could_be_worked() -> None:
    before, after = CpuTimes(10.0, 100.0, 3.0, 4), CpuTimes(20.0, 113.0, 8.0, 4)
    assert share_of_others(before, after) == pytest.approx((13 - 5) / (4 * 10))


def test_counted_are_the_processors_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User, nice, system, interrupts and what a hypervisor stole are work; idle, waiting and guests are not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 12})
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 5000 400 1 2 7 90 80\n"
        "cpu1 9000 0 0 0 0 0 0 0 0 0\n"
        "cpu12 40 0 0 0 0 0 0 0 0 0\n"
        "intr 5 5 5\n"
    )
    times = cpu_times(stat)
    assert times is not None
    assert (times.busy, times.processors) == ((100 + 20 + 30 + 1 + 2 + 7 + 40) / TICKS, 2)


BURNS = """
import os, sys
while os.times().user + os.times().system < 1.0: pass
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no /proc/stat")
def test_a_program_that_computes_is_seen_and_our_own_work_is_not() -> None:
    before = cpu_times()
    with subprocess.Popen([sys.executable, "-c", BURNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        after = cpu_times()
        other.communicate()
    assert before is not None
    assert after is not None
    share = share_of_others(before, after)
    assert share is not None
    assert share * after.processors * (after.clock - before.clock) > 0.8, "seconds of the second that it took"
