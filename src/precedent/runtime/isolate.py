"""Batched work that falls back to one item at a time, so that only the item at fault fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from precedent.runtime.failures import is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")


def together(
    items: Sequence[Item],
    act: Callable[[Sequence[Item]], Sequence[Result]],
    fail: Callable[[Item, Exception], None],
) -> list[tuple[Item, Result]]:
    """Call `act` on all items at once; if it raises, on each alone, and call `fail` for those that raise again.

    `act` returns one result per item and may be called more than once. Returns the items that succeeded, with their
    results.
    """
    if not items:
        return []
    try:
        return list(zip(items, act(items), strict=True))
    except Exception as error:
        if is_out_of_memory(error):
            error.with_traceback(None)  # its frames hold the very tensors that did not fit
        if len(items) == 1:
            fail(items[0], error)
            return []
    return [pair for item in items for pair in together([item], act, fail)]
