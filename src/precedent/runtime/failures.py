"""Turns failures of other libraries into this package's errors, and finds whose failure one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import TypeVar

import torch

from precedent.errors import GenerationError, PrecedentError
from precedent.runtime.plain_values import first_line

Item = TypeVar("Item")
Result = TypeVar("Result")

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Words in the plain RuntimeError that torch raises on a CPU and on some accelerators."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


class OutOfMemory(GenerationError):
    """Memory ran out while serving this request; the others continue."""


def as_ours(error: Exception, doing: str) -> PrecedentError:
    """The error to fail a request with; `doing` says what was going on, as in "prefilling 812 tokens".

    A caller may keep it, so the frames in its traceback let go of what they hold.
    """
    clear_frames(error.__traceback__)
    if isinstance(error, PrecedentError):
        return error
    if is_out_of_memory(error):
        error.with_traceback(None)  # its frames hold the very tensors that did not fit
        return OutOfMemory(
            f"memory ran out while {doing}: ask for fewer max_tokens or a shorter prompt, "
            f"or lower max_running or max_kv_bytes of EngineLimits ({first_line(error)})"
        )
    failure = GenerationError(f"{type(error).__name__} while {doing}: {first_line(error)}")
    failure.__cause__ = error
    return failure


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
