"""A fence: what fails is left out, switched off after three faults within a minute, and tried again after a pause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

from precedent.runtime.background import Background, long_work
from precedent.runtime.fence import FIRST_PAUSE, LONGEST_PAUSE, WITHIN, Fence, Fences


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def fence(clock: HandClock) -> Fence:
    return Fence("recall", clock, deadline=5.0)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Background(2, "test") as background:
        yield background


def broken() -> str:
    raise ValueError("it broke")


def switch_off(fence: Fence) -> None:
    for _ in range(3):
        fence.run(broken, "plain")


def test_three_faults_within_a_minute_switch_it_off_with_one_warning(
    fence: Fence, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        switch_off(fence)
        assert not fence.is_on
        assert fence.degraded
        assert fence.run(lambda: "fast", "plain") == "plain"
        for _ in range(10):
            fence.fault(ValueError("a request that was running"))
    (record,) = caplog.records
    assert record.getMessage().startswith("recall is switched off after 3 faults")
    assert "ValueError: it broke" in record.getMessage()


def test_three_faults_in_a_longer_time_do_not(fence: Fence, clock: HandClock) -> None:
    for _ in range(20):
        fence.run(broken, "plain")
        clock.now += WITHIN / 2 + 1.0
    assert fence.is_on
    assert not fence.degraded


def test_it_is_tried_again_after_a_pause_and_trusted_after_a_minute(
    fence: Fence, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    switch_off(fence)
    clock.now += FIRST_PAUSE - 1.0
    assert not fence.is_on
    clock.now += 1.0
    assert fence.run(lambda: "fast", "plain") == "fast"
    assert fence.degraded, "on trial"
    with caplog.at_level(logging.INFO):
        clock.now += WITHIN
        assert not fence.degraded
        assert "recall works again" in caplog.text
    fence.run(broken, "plain")
    assert fence.is_on, "earlier faults are forgotten"


def test_each_try_that_fails_doubles_the_pause_without_another_warning(
    fence: Fence, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    switch_off(fence)
    pauses, pause = [], FIRST_PAUSE
    for _ in range(7):
        clock.now += pause
        fence.run(broken, "plain")
        began = clock.now
        while not fence.is_on:
            clock.now += 1.0
        pause = clock.now - began
        pauses.append(pause)
        clock.now = began
    assert pauses == [60.0, 120.0, 240.0, 480.0, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_work_beyond_its_deadline_is_a_fault_and_is_not_waited_for(
    fence: Fence, executor: Executor, clock: HandClock
) -> None:
    go_on = threading.Event()
    for _ in range(3):
        assert fence.submit(executor, go_on.wait, 60.0) is not None
    assert fence.is_on
    clock.now += 5.5
    assert not fence.is_on, "three are overdue"
    assert fence.num_faults == 3
    assert fence.submit(executor, go_on.wait, 60.0) is None, "nothing piles up behind work that hangs"
    go_on.set()
    assert fence.settle()
    assert fence.num_faults == 3


def test_work_that_is_given_up_keeps_it_off_until_it_returns(fence: Fence, executor: Executor) -> None:
    go_on = threading.Event()
    work = executor.submit(go_on.wait, 60.0)
    fence.hangs(work)
    assert not fence.is_on
    assert fence.degraded
    go_on.set()
    work.result()
    assert fence.settle()
    assert fence.is_on


def test_settling_waits_at_most_until_the_deadline(executor: Executor) -> None:
    fence, go_on = Fence("recall", deadline=0.05), threading.Event()
    fence.submit(executor, go_on.wait, 60.0)
    fence.settle()
    assert fence.num_faults == 1
    go_on.set()


def test_fences_name_what_is_degraded_and_count_faults(clock: HandClock) -> None:
    fences = Fences(clock)
    switch_off(fences.of("recall"))
    fences.of("write-back").run(broken, "plain")
    fences.of("planner").run(lambda: "fast", "plain")
    assert fences.degraded() == ("recall",)
    assert fences.faults() == {"recall": 3, "write-back": 1}
    assert fences.of("recall") is fences.of("recall")


def test_a_fence_that_only_counts_never_switches_off(clock: HandClock) -> None:
    fence = Fences(clock, switch_off=False).of("the store")
    for _ in range(10):
        fence.run(broken, "plain")
    assert fence.run(lambda: "fast", "plain") == "fast"
    assert (fence.num_faults, fence.degraded) == (10, False)


def test_the_end_of_an_executor_and_an_interruption_are_no_faults(fence: Fence) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    gone = Background(1, "gone")
    gone.shutdown()
    assert fence.submit(gone, broken) is None
    with pytest.raises(KeyboardInterrupt):
        fence.run(interrupted, None)
    assert fence.num_faults == 0


def test_long_work_ends_on_a_traced_thread() -> None:
    """As under a debugger, or where coverage is measured."""

    def work() -> int:
        with long_work():
            return 5

    before = threading.gettrace()
    threading.settrace(lambda *event: None)
    try:
        assert Background(1, "traced").submit(work).result(timeout=20) == 5
    finally:
        threading.settrace(before)  # type: ignore[arg-type]
