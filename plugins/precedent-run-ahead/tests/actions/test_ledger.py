"""The ledger of calls that run ahead: bounds, and what was taken while it still ran.

That no result is stale, foreign, used twice or too old is for `test_interleavings.py` to show.
"""

from __future__ import annotations

import pytest

from precedent.errors import ConfigError
from precedent_run_ahead.actions.ledger import Lane, Ledger, Pending

TOOL = object()


def begun(ledger: Ledger, lane: Lane, key: str = "{}") -> Pending:
    pending = ledger.begin(lane, TOOL, "look_up", key, "own")
    assert pending is not None
    return pending


def starts(ledger: Ledger, lane: Lane | None = None, key: str = "{}") -> bool:
    return ledger.begin(lane or Lane(), TOOL, "look_up", key, "memory") is not None


def taken_while_running(ledger: Ledger) -> Pending:
    """A call that was taken before its result is there."""
    lane = Lane()
    pending = begun(ledger, lane)
    assert ledger.take(lane, TOOL, "{}") is pending
    return pending


def test_a_call_that_hangs_fails_or_ends_without_a_result_has_none() -> None:
    ledger = Ledger(time_to_live=0.01, clock=lambda: 0.0)  # it is never too late to take a call
    assert ledger.wait(taken_while_running(ledger)) is None
    failed, ended = taken_while_running(ledger), taken_while_running(ledger)
    failed.result.set_exception(ValueError("broken"))
    ledger.ended(ended)
    assert ledger.wait(failed) is ledger.wait(ended) is None


def test_so_many_run_at_once_and_so_many_in_a_run_and_none_twice() -> None:
    ledger, lane = Ledger(at_once=2, most_per_run=3), Lane()
    first = begun(ledger, lane, "1")
    assert not starts(ledger, lane, "1")
    begun(ledger, lane, "2")
    assert not starts(ledger, lane, "3")
    ledger.ended(first)
    ledger.ended(begun(ledger, lane, "3"))
    assert not starts(ledger, lane, "4")
    assert starts(ledger, key="4")


def test_a_tool_that_still_runs_keeps_the_place_of_its_ended_call_and_does_not_start_again() -> None:
    ledger = Ledger(at_once=1)
    pending = begun(ledger, Lane())
    assert ledger.hold(pending)
    assert not ledger.hold(pending)
    ledger.ended(pending)
    assert not starts(ledger)
    ledger.release(pending)
    assert not ledger.hold(pending)
    assert starts(ledger)


@pytest.mark.parametrize("wrong", [{"at_once": 0}, {"most_per_run": -1}, {"time_to_live": 0.0}])
def test_wrong_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ledger(**wrong)  # type: ignore[arg-type]


def test_a_change_voids_what_was_taken_and_is_still_waited_for() -> None:
    ledger = Ledger()
    pending = taken_while_running(ledger)
    with ledger.change():
        pending.result.set_result("read before the change was over")
    assert ledger.wait(pending) is None


def test_a_change_that_fails_is_over_too() -> None:
    ledger = Ledger()
    with pytest.raises(ZeroDivisionError), ledger.change():
        raise ZeroDivisionError
    assert starts(ledger)


def test_a_result_that_is_too_old_after_waiting_or_that_became_another_is_not_used() -> None:
    now = [0.0]
    ledger = Ledger(time_to_live=5.0, clock=lambda: now[0])
    late, changed = taken_while_running(ledger), taken_while_running(ledger)
    late.result.set_result("late")
    changed.key = "[]"
    changed.result.set_result("found for other arguments")
    assert ledger.wait(changed) is None
    now[0] = 5.1
    assert ledger.wait(late) is None


def test_a_discarded_call_that_still_runs_keeps_its_place() -> None:
    ledger, lane = Ledger(at_once=1), Lane()
    hung = begun(ledger, lane)
    ledger.discard(lane, "cancelled")
    assert not starts(ledger)
    ledger.ended(hung)
    assert starts(ledger)
