"""The ledger of calls that run ahead: no result is stale, foreign, used twice or too old."""

from __future__ import annotations

import pytest

from precedent.errors import ConfigError
from precedent_run_ahead.actions.ledger import Lane, Ledger, Pending

TOOL = object()


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(ledger: Ledger, lane: Lane, key: str = "{}", *, tool: object = TOOL) -> Pending:
    pending = ledger.begin(lane, tool, "look_up", key, "own")
    assert pending is not None
    return pending


def finished(ledger: Ledger, lane: Lane, key: str = "{}") -> Pending:
    pending = begun(ledger, lane, key)
    pending.result.set_result("found")
    ledger.ended(pending)
    return pending


def taken(ledger: Ledger, lane: Lane, key: str = "{}", *, tool: object = TOOL) -> object:
    pending = ledger.take(lane, tool, key)
    return None if pending is None else ledger.wait(pending)


def test_a_result_is_used_once() -> None:
    ledger, lane = Ledger(), Lane()
    finished(ledger, lane)
    assert taken(ledger, lane) == "found"
    assert taken(ledger, lane) is None


def test_a_result_is_for_its_own_lane_tool_and_arguments() -> None:
    ledger, lane = Ledger(), Lane()
    finished(ledger, lane)
    assert taken(ledger, Lane()) is None
    assert taken(ledger, lane, tool=object()) is None
    assert taken(ledger, lane, "[]") is None
    assert taken(ledger, lane) == "found"


def test_a_change_voids_every_lane_s_results_when_it_begins() -> None:
    ledger, one, other = Ledger(), Lane(), Lane()
    finished(ledger, one)
    finished(ledger, other)
    with ledger.change():
        assert taken(ledger, one) is taken(ledger, other) is None
    assert ledger.counts.discarded == {"changed": 2}


def test_nothing_starts_while_a_change_is_in_flight() -> None:
    ledger, lane = Ledger(), Lane()
    with ledger.change():
        with ledger.change():
            assert ledger.begin(lane, TOOL, "look_up", "{}", "own") is None
        assert ledger.begin(lane, TOOL, "look_up", "{}", "own") is None
    begun(ledger, lane)


def test_a_change_that_fails_is_over_too() -> None:
    ledger, lane = Ledger(), Lane()
    with pytest.raises(ZeroDivisionError), ledger.change():
        raise ZeroDivisionError
    begun(ledger, lane)


def test_a_change_voids_what_was_taken_and_is_still_waited_for() -> None:
    ledger, lane = Ledger(), Lane()
    pending = begun(ledger, lane)
    assert ledger.take(lane, TOOL, "{}") is pending
    with ledger.change():
        pending.result.set_result("read before the change was over")
    assert ledger.wait(pending) is None


def test_a_change_voids_at_its_end_what_began_in_spite_of_it() -> None:
    """The epoch that a call carries is the one before the change's end, whatever let it begin."""
    ledger, lane = Ledger(), Lane()
    change = ledger.change()
    change.__enter__()
    ledger._changes = 0  # as a rule that forgot changes in flight would see it
    pending = begun(ledger, lane)
    ledger._changes = 1
    change.__exit__(None, None, None)
    pending.result.set_result("half changed")
    assert taken(ledger, lane) is None


def test_a_result_lives_for_a_time() -> None:
    clock = Clock()
    ledger, lane = Ledger(time_to_live=5.0, clock=clock), Lane()
    finished(ledger, lane)
    clock.now = 5.1
    assert taken(ledger, lane) is None
    assert ledger.counts.discarded == {"expired": 1}


def test_a_result_that_is_too_old_after_waiting_is_not_used() -> None:
    clock = Clock()
    ledger, lane = Ledger(time_to_live=5.0, clock=clock), Lane()
    pending = begun(ledger, lane)
    assert ledger.take(lane, TOOL, "{}") is pending
    pending.result.set_result("late")
    clock.now = 5.1
    assert ledger.wait(pending) is None


def test_a_call_that_hangs_is_waited_for_no_longer_than_it_may_live() -> None:
    ledger, lane = Ledger(time_to_live=0.01), Lane()
    pending = begun(ledger, lane)
    assert ledger.wait(pending) is None


def test_an_error_is_no_result() -> None:
    ledger, lane = Ledger(), Lane()
    begun(ledger, lane).result.set_exception(ValueError("broken"))
    assert taken(ledger, lane) is None


def test_a_call_that_ended_without_a_result_is_no_result() -> None:
    ledger, lane = Ledger(), Lane()
    ledger.ended(begun(ledger, lane))
    assert taken(ledger, lane) is None


def test_so_many_run_at_once_and_so_many_in_a_run() -> None:
    ledger, lane = Ledger(at_once=2, most_per_run=3), Lane()
    first = begun(ledger, lane, "1")
    begun(ledger, lane, "2")
    assert ledger.begin(lane, TOOL, "look_up", "3", "own") is None
    ledger.ended(first)
    ledger.ended(begun(ledger, lane, "3"))
    assert ledger.begin(lane, TOOL, "look_up", "4", "own") is None
    assert ledger.begin(Lane(), TOOL, "look_up", "4", "own") is not None


def test_a_discarded_call_that_still_runs_keeps_its_place() -> None:
    ledger, lane = Ledger(at_once=1), Lane()
    hung = begun(ledger, lane)
    ledger.discard(lane, "cancelled")
    assert ledger.begin(Lane(), TOOL, "look_up", "{}", "own") is None
    ledger.ended(hung)
    assert ledger.begin(Lane(), TOOL, "look_up", "{}", "own") is not None


def test_the_same_call_does_not_start_twice() -> None:
    ledger, lane = Ledger(), Lane()
    begun(ledger, lane)
    assert ledger.begin(lane, TOOL, "look_up", "{}", "memory") is None


def test_what_is_discarded_is_told_to_stop() -> None:
    ledger, lane, stopped = Ledger(), Lane(), list[str]()
    for key, end in (("1", lambda: ledger.discard(lane, "cancelled")), ("2", ledger.void)):
        pending = begun(ledger, lane, key)
        pending.stop = lambda key=key: stopped.append(key)
        end()
    assert stopped == ["1", "2"]


def test_a_lane_of_an_invocation_that_is_over_lets_go_of_its_results() -> None:
    over = False
    ledger, lane, stopped = Ledger(), Lane(over=lambda: over), list[str]()
    begun(ledger, lane).stop = lambda: stopped.append("stopped")
    over = True
    assert taken(ledger, lane) is None
    assert stopped == ["stopped"]


@pytest.mark.parametrize("wrong", [{"at_once": 0}, {"most_per_run": -1}, {"time_to_live": 0.0}])
def test_wrong_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ledger(**wrong)  # type: ignore[arg-type]


def test_a_call_that_became_another_after_it_was_taken_is_not_used() -> None:
    ledger, lane = Ledger(), Lane()
    pending = begun(ledger, lane)
    assert ledger.take(lane, TOOL, "{}") is pending
    pending.key = "[]"
    pending.result.set_result("found for other arguments")
    assert ledger.wait(pending) is None


def test_a_tool_that_still_runs_keeps_the_place_of_its_ended_call_and_does_not_start_again() -> None:
    ledger, lane = Ledger(at_once=1), Lane()
    pending = begun(ledger, lane)
    assert ledger.hold(pending)
    assert not ledger.hold(pending)
    ledger.ended(pending)
    assert ledger.begin(Lane(), TOOL, "look_up", "{}", "own") is None
    ledger.release(pending)
    assert not ledger.hold(pending)
    assert ledger.begin(Lane(), TOOL, "look_up", "{}", "own") is not None
