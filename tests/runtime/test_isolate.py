"""Together, and one by one if that fails: each failure is felt by the one at fault alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from precedent.runtime.failures import together


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


@pytest.mark.parametrize("guilty", [(2,), (1, 3), (1, 2, 3)])
def test_after_a_failure_each_is_tried_alone_and_only_the_guilty_fail(guilty: tuple[int, ...]) -> None:
    """In their order, once each; the others keep their results."""
    work = Work(*guilty)
    assert together([1, 2, 3], work, work.fail) == [(item, 2 * item) for item in (1, 2, 3) if item not in guilty]
    assert work.batches == [[1, 2, 3], [1], [2], [3]]
    assert work.failed == [(item, work.error) for item in guilty]


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

    gc.disable()
    try:
        assert together([1, 2], act, lambda item, failure: pytest.fail(str(failure))) == [(1, 1), (2, 2)]
    finally:
        gc.enable()
