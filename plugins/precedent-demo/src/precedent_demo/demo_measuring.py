"""Warms the demo's cache and measures, request by request, until the speed-up is known well enough or time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from precedent.cli.progress import Progress
from precedent.cli.speedup import FEWEST_FOR_INTERVAL, Speedup
from precedent.runtime.machine_load import CpuTimes, cpu_times, share_of_others
from precedent_demo.demo_runs import Run, rotated, speedups, with_speedups
from precedent_demo.demo_verdict import NAMED, so_far

if TYPE_CHECKING:
    from precedent_demo import Request
    from precedent_demo.demo_runs import Bench
    from precedent_demo.demo_state import DemoState

Clock = Callable[[], float]

WARMING_REQUESTS, FEWEST_WARMED = 16, 6
"""Requests that fill the cache by default, and on a machine where `WARMING_SECONDS` do not suffice for more."""

WARMING_SECONDS = 45.0

MEASURING_SECONDS = 120.0
"""Measuring ends after this time; after up to twice as long if there are too few requests for an interval by then."""

NARROW = 0.1
"""Measuring ends earlier once each speed-up that the verdict names is known within this share."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How many requests warm the cache and are measured (None: all that there are), and for how many seconds at most.

    With `adaptive` measuring ends as soon as the figures are good enough.
    """

    warming: int | None = WARMING_REQUESTS
    measured: int | None = None
    warming_seconds: float = WARMING_SECONDS
    adaptive: bool = True

    @classmethod
    def of(cls, full: bool, number: int | None) -> Extent:
        """All requests, `number` requests, or as many as it takes."""
        if not full and number is None:
            return cls()
        return cls(None if number is None else 2 * number, number, inf, adaptive=False)


def warm(
    bench: Bench,
    state: DemoState,
    wanted: Sequence[Request],
    progress: Progress,
    *,
    seconds: float = inf,
    clock: Clock = perf_counter,
) -> int:
    """Run set A to fill the cache, for about `seconds`; returns how many requests the cache holds.

    Requests that an earlier demo completed are not run again.
    """
    from precedent_demo import make_database

    desk, begun = make_database(seed=0), clock()
    done = [name for name in state.warmed() if name in {request.request_id for request in wanted}]
    for request in wanted:
        if request.request_id in done:
            continue
        if len(done) >= FEWEST_WARMED and clock() - begun > seconds:
            break
        progress.show("warming the cache (set A)", len(done), len(wanted), request.workflow)
        bench.warm(request, desk)
        done.append(request.request_id)
        state.mark_warmed(done)
    progress.show("warming the cache (set A)", len(done), len(wanted))
    return len(done)


def measure(
    bench: Bench,
    wanted: Sequence[Request],
    progress: Progress,
    *,
    adaptive: bool = True,
    clock: Clock = perf_counter,
    read_times: Callable[[], CpuTimes | None] = cpu_times,
) -> float | None:
    """Run set B (other requests of the same workflows), each once in every way; shows the figures after each request.

    Returns the share of processor time that other programs took meanwhile, None if unknown.
    """
    from precedent_demo import make_database

    desk, begun, before, busy = make_database(seed=0), clock(), read_times(), None
    for number, request in enumerate(wanted, start=1):
        for name in rotated(list(bench.engines), number - 1):
            total = None if adaptive else len(wanted)
            progress.show("measuring (set B)", number - 1, total, f"{request.workflow}, {name}")
            bench.measure(request, desk, name)
        busy = share_of_others(before, read_times())
        progress.say(so_far(with_speedups(bench.runs), busy))
        if adaptive and enough(_named(bench.runs), number, clock() - begun):
            break
    return busy


def enough(found: Iterable[Speedup], number: int, seconds: float) -> bool:
    """Whether to stop: all speed-ups are known within `NARROW`, or time is over."""
    if all(one.uncertainty <= NARROW for one in found):
        return True
    return seconds >= (MEASURING_SECONDS if number >= FEWEST_FOR_INTERVAL else 2 * MEASURING_SECONDS)


def _named(runs: Mapping[str, Run]) -> list[Speedup]:
    """The speed-ups that the verdict names."""
    return [found for name in NAMED for found in speedups(runs[name], runs["plain"]).values()]
