"""Times the parts of a step, for every sequence in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from precedent.decoding.sequence import DecodingSequence


@contextmanager
def counted(
    sequences: Sequence[DecodingSequence], clock: Literal["forward_seconds", "verify_seconds"]
) -> Iterator[None]:
    """Add the seconds that the body takes to each sequence's statistics."""
    started = perf_counter()
    try:
        yield
    finally:
        seconds = perf_counter() - started
        for sequence in sequences:
            setattr(sequence.stats, clock, getattr(sequence.stats, clock) + seconds)
