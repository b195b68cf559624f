"""Together, and one by one if that fails: each failure is felt by the one at fault alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from precedent.runtime.isolate import together


class Work:
    """Doubles numbers; a batch that holds one of the `guilty` fails as a whole."""

    def __init__(self, *guilty: int, error: Exception | None = None) -> None:
        self.guilty, self.error = guilty, error or ValueError("boom")
        self.batches: list[list[int]] = []
        self.failed: list[tuple[int, Exception]] = []

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        if set(items) & set(self.guilty):
            raise self.error
        return [2 * item for item in items]

    def fail(self, item: int, error: Exception) -> None:
        self.failed.append((item, error))


def test_what_succeeds_together_is_done_once() -> None:
    work = Work()
    assert together([1, 2, 3], work, work.fail) == [(1, 2), (2, 4), (3, 6)]
    assert work.batches == [[1, 2, 3]]
    assert work.failed == []


def test_nothing_is_asked_for_no_items() -> None:
    work = Work()
    assert together([], work, work.fail) == []
    assert work.batches == []


@pytest.mark.parametrize("guilty", [(2,), (1, 3), (1, 2, 3)])
def test_after_a_failure_each_is_tried_alone_and_only_the_guilty_fail(guilty: tuple[int, ...]) -> None:
    """In their order, once each; the others keep their results."""
    work = Work(*guilty)
    assert together([1, 2, 3], work, work.fail) == [(item, 2 * item) for item in (1, 2, 3) if item not in guilty]
    assert work.batches == [[1, 2, 3], [1], [2], [3]]
    assert work.failed == [(item, work.error) for item in guilty]


def test_one_that_fails_alone_is_not_tried_again() -> None:
    work = Work(1)
    assert together([1], work, work.fail) == []
    assert work.batches == [[1]]
    assert work.failed == [(1, work.error)]


def test_a_batch_that_fails_by_chance_costs_nobody_anything() -> None:
    """Each alone succeeds: nobody was at fault."""
    work = Work()

    def once(items: Sequence[int]) -> list[int]:
        if len(items) > 1:
            raise RuntimeError("too many at once")
        return work(items)

    assert together([1, 2], once, work.fail) == [(1, 2), (2, 4)]
    assert work.failed == []


def test_an_answer_of_the_wrong_length_is_a_failure() -> None:
    """Results must not be given to the wrong item."""
    work = Work()
    assert together([1, 2], lambda items: [0] * 3, work.fail) == []
    assert [item for item, _ in work.failed] == [1, 2]
    assert all(isinstance(error, ValueError) for _, error in work.failed)


def test_only_exceptions_are_caught() -> None:
    """Whoever interrupts the program means all of it."""

    def interrupted(items: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together([1, 2], interrupted, lambda item, error: None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, ValueError])
def test_what_a_failed_batch_had_made_is_gone_before_each_is_tried_alone(error: type[Exception]) -> None:
    """Where memory ran out, the very tensors that did not fit would be in the way."""
    made: list[weakref.ref[torch.Tensor]] = []

    def act(items: Sequence[int]) -> list[int]:
        if len(items) > 1:
            large = torch.zeros(1000)
            made.append(weakref.ref(large))
            raise error("too large")
        assert made[0]() is None, "the frames of the first try are still held"
        return list(items)

    gc.collect()
    gc.disable()
    try:
        assert together([1, 2], act, lambda item, failure: pytest.fail(str(failure))) == [(1, 1), (2, 2)]
    finally:
        gc.enable()
