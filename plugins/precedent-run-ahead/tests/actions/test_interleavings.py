"""Random interleavings of predictions, calls, changes, cancellations and failures: no result is stale or foreign.

The world has a version that changes while a change is in flight. A reading carries the version, lane and arguments it
was made with; whatever the ledger hands over must be what the same reading would say at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from precedent_run_ahead.actions.ledger import Lane, Ledger, Pending

LANES, KEYS, TOOLS = range(3), ("1", "2"), ("listed", "also listed")
TIME_TO_LIVE = 10.0


@dataclass(frozen=True)
class Reading:
    """What a tool said: whom it was read for, what was asked, in which version of the world, and when it began."""

    lane: int
    tool: str
    key: str
    version: int
    begun: float


class Interleavings(RuleBasedStateMachine):
    """Acts as agents, tools and clock at once."""

    @initialize()
    def start(self) -> None:
        self.now, self.version = 0.0, 0
        self.ledger = Ledger(at_once=4, most_per_run=30, time_to_live=TIME_TO_LIVE, clock=lambda: self.now)
        self.over: list[list[bool]] = [[] for _ in LANES]
        self.lanes = [self.lane(number) for number in LANES]
        self.tools = {name: object() for name in TOOLS}
        self.running: list[tuple[Pending, Reading]] = []
        self.waiting: list[tuple[Pending, int, str, str]] = []
        self.changes: list[Any] = []
        self.used: set[str] = set()
        self.stopped: set[str] = set()

    def lane(self, number: int) -> Lane:
        age = len(self.over[number])
        return Lane(over=lambda: len(self.over[number]) > age)

    @rule(lane=st.sampled_from(LANES), tool=st.sampled_from(TOOLS), key=st.sampled_from(KEYS))
    def predict(self, lane: int, tool: str, key: str) -> None:
        pending = self.ledger.begin(self.lanes[lane], self.tools[tool], tool, key, "own")
        if pending is None:
            return
        assert not self.changes, "something started while a change was in flight"
        pending.stop = lambda: self.stopped.add(pending.id)
        self.running.append((pending, Reading(lane, tool, key, self.version, self.now)))
        assert len(self.running) <= 4

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["answers", "fails", "is stopped"]))
    def end(self, data: st.DataObject, how: str) -> None:
        pending, reading = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how == "answers":
            pending.result.set_result(reading)
        elif how == "fails":
            pending.result.set_exception(ConnectionError("down"))
            self.ledger.drop(pending, "failed")
        self.ledger.ended(pending)

    @rule(lane=st.sampled_from(LANES), tool=st.sampled_from(TOOLS), key=st.sampled_from(KEYS))
    def call(self, lane: int, tool: str, key: str) -> None:
        pending = self.ledger.take(self.lanes[lane], self.tools[tool], key)
        if pending is not None:
            self.waiting.append((pending, lane, tool, key))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        pending, lane, tool, key = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        reading = self.ledger.result_of(pending)
        if reading is None:
            self.ledger.lost(pending, "failed")
            return
        assert reading == Reading(lane, tool, key, self.version, reading.begun), "a stale or foreign result"
        assert self.now - reading.begun <= TIME_TO_LIVE, "a result beyond its time"
        assert pending.id not in self.used, "a result that was used before"
        self.used.add(pending.id)
        self.ledger.used(pending, 0.4)

    @precondition(lambda self: len(self.changes) < 2)
    @rule()
    def change_begins(self) -> None:
        change = self.ledger.change()
        change.__enter__()
        self.changes.append(change)

    @precondition(lambda self: self.changes)
    @rule()
    def the_world_changes(self) -> None:
        self.version += 1

    @precondition(lambda self: self.changes)
    @rule(fails=st.booleans())
    def change_ends(self, fails: bool) -> None:
        error = ConnectionError("down") if fails else None
        assert not self.changes.pop().__exit__(error and type(error), error, None)

    @rule()
    def something_else_changes_the_world(self) -> None:
        self.version += 1
        self.ledger.void()

    @rule(lane=st.sampled_from(LANES))
    def cancel(self, lane: int) -> None:
        self.ledger.discard(self.lanes[lane], "cancelled")

    @rule(lane=st.sampled_from(LANES))
    def begin_anew(self, lane: int) -> None:
        """The invocation is over without a word; another begins, with a lane of its own."""
        self.over[lane].append(True)
        self.lanes[lane] = self.lane(lane)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def what_is_dropped_is_stopped(self) -> None:
        if hasattr(self, "running"):
            dropped = {one.id for one, _ in self.running if one.dropped}
            assert dropped <= self.stopped

    @invariant()
    def the_counts_agree(self) -> None:
        if hasattr(self, "ledger"):
            counts = self.ledger.counts
            assert counts.used == len(self.used)
            assert counts.used + counts.discarded.total() <= counts.started


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_no_interleaving_hands_over_a_stale_or_foreign_result() -> None:
    run_state_machine_as_test(Interleavings, settings=settings(max_examples=60, stateful_step_count=30, **QUIET))


@pytest.mark.stress
def test_10_000_interleavings_hand_over_no_stale_or_foreign_result() -> None:
    run_state_machine_as_test(Interleavings, settings=settings(max_examples=10_000, stateful_step_count=50, **QUIET))


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["epoch", "changes", "deadline", "once", "lane"])
def test_the_interleavings_see_a_rule_that_is_forgotten(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule of the ledger is broken in turn, and some interleaving must show it."""
    breaks = {
        "epoch": lambda: monkeypatch.setattr(
            Ledger, "_void", lambda self, step: setattr(self, "_changes", self._changes + step)
        ),
        "changes": lambda: monkeypatch.setattr(Ledger, "_void", _without_counting),
        "deadline": lambda: (
            monkeypatch.setattr(Ledger, "_is_fresh", lambda self, one: one.epoch == self._epoch)
            or monkeypatch.setattr(Ledger, "_expire", lambda self: None)
        ),
        "once": lambda: monkeypatch.setattr(Ledger, "take", _take_and_keep),
        "lane": lambda: monkeypatch.setattr(Ledger, "take", _take_anybody_s),
    }
    breaks[forgotten]()
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Interleavings,
            settings=settings(
                max_examples=3000,
                stateful_step_count=40,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                **QUIET,
            ),
        )


def _without_counting(self: Ledger, step: int) -> None:
    self._epoch += 1


def _take_and_keep(self: Ledger, lane: Lane, tool: object, key: str) -> Pending | None:
    return next((one for one in lane.waiting if one.tool is tool and one.key == key), None)


def _take_anybody_s(self: Ledger, lane: Lane, tool: object, key: str) -> Pending | None:
    for one in list(self._waiting):
        if one.tool is tool and one.key == key:
            self._remove(one)
            return one
    return None
