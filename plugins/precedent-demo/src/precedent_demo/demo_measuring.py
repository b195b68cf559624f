"""Runs `precedent demo`: loads, warms the cache, measures until the speed-ups are known, and compares the answers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import platformdirs
from rich.console import Console

import precedent_demo
from precedent.cache import SpeculationCache
from precedent.cli.options import write_json
from precedent.cli.progress import Progress
from precedent.cli.speedup import FEWEST_FOR_INTERVAL, Speedup
from precedent.drafters import load_draft
from precedent.runtime.machine_load import CpuTimes, cpu_times, share_of_others
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent_demo import block_folder, draft_folder, make_database, make_requests
from precedent_demo.adapted import packaged_target
from precedent_demo.demo import ORDER_DESK, UNTRAINED_DRAFT, Asked
from precedent_demo.demo_report import NAMED, OWN_BLOCK, OWN_CHAIN, demo_page, show, so_far
from precedent_demo.demo_runs import Bench, Run, Turn, rotated, speedups, ways_of, with_speedups
from precedent_demo.requests import Request

Clock = Callable[[], float]

LAYOUT = "4"
"""Increase it when requests, prompts, templates or the form of a cache change: what was stored no longer fits."""

WARMING_REQUESTS, FEWEST_WARMED = 16, 6
"""Requests that fill the cache by default, and on a machine where `WARMING_SECONDS` do not suffice for more."""

WARMING_SECONDS = 45.0

MEASURING_SECONDS = 120.0
"""Measuring ends after this time; after up to twice as long if there are too few requests for an interval by then."""

NARROW = 0.1
"""Measuring ends earlier once each speed-up that the verdict names is known within this share."""


def run_demo(asked: Asked, progress: Progress, json_file: Path | None, html: Path | None) -> None:
    """Warm, measure, compare, and hand out the results."""
    bench, state, drafts = loaded(asked, progress)
    with closing(bench):
        extent = Extent.of(asked.full, asked.requests)
        others, own = (make_requests(name, full=asked.full, seed=0) for name in ("A", "B"))
        warmed = warm(bench, state, others[: extent.warming], progress, seconds=extent.warming_seconds)
        bench.copy_warm_cache()
        busy = measure(bench, own[: extent.measured], progress, adaptive=extent.adaptive)
        progress.show("comparing the answers")
        machine = bench.machine() | drafts | {"others_cpu_share": None if busy is None else round(busy, 3)}
        results = {"temperature": asked.temperature, "machine": machine, "runs": with_speedups(bench.runs)}
        # sampled texts differ by chance: counting equal ones means nothing
        results |= differences(bench) if asked.temperature == 0 else {"identical_outputs": {}, "first_differences": []}
        results["warming_requests"] = warmed
        progress.rest()
        show(Console(), results)
        write_json(json_file, results)
        if html:
            tokenizer = bench.engines["plain"].tokenizer
            page = demo_page(results, bench.runs, lambda ids: str(tokenizer.decode(list(ids))))
            html.write_text(page, encoding="utf-8")


def loaded(asked: Asked, progress: Progress) -> tuple[Bench, DemoState, dict[str, str]]:
    """The model with its caches and engines, the state that earlier demos left, and the draft models' names."""
    own = asked.target == ORDER_DESK
    progress.show(f"loading {asked.target}", note="built on the first run" if own else "")
    drafts = {"draft_model": asked.draft_model or (str(draft_folder()) if own else UNTRAINED_DRAFT)}
    if asked.other_draft_model or (own and asked.full and asked.draft_model is None):
        drafts["other_draft_model"] = asked.other_draft_model or str(block_folder())
    source = packaged_target() if own else asked.target
    # the packaged model's own template takes no tools; this one is what the library would take in its place
    template = asked.chat_template or ("hermes" if asked.target in (ORDER_DESK, DEMO_TARGET) else None)
    model, tokenizer = load_target(source, device=asked.device, dtype=asked.dtype, chat_template=template)
    models = {role: load_draft(draft, model, tokenizer) for role, draft in drafts.items()}
    with_tools = () if asked.tool_latency is None else ("with actions",)
    state = DemoState(source, asked.draft_model or "", model.dtype, asked.temperature, asked.full, *with_tools)
    if asked.fresh:
        shutil.rmtree(state.folder, ignore_errors=True)
    progress.show("starting engines and measuring this machine's cost per step")
    cache = SpeculationCache.open(state.folder / "cache")
    cache.warm_up()  # loading the embedder later would distort the measurement
    other = models.get("other_draft_model")
    ways = ways_of(asked.temperature, asked.full, other is not None)
    if asked.tool_latency is not None:
        ways = tuple(way for way in ways if way.name in ("plain", "both"))
    bench = Bench(
        model, tokenizer, asked.target, models["draft_model"], cache, ways,
        temperature=asked.temperature, max_tokens=precedent_demo.MAX_TOKENS_PER_TURN, other_draft=other,
    )  # fmt: skip
    shown = {str(block_folder()): OWN_BLOCK, str(draft_folder()): OWN_CHAIN}
    return bench, state, {role: shown.get(draft, draft) for role, draft in drafts.items()}


class DemoState:
    """A folder in the user's cache folder, one per target, draft model, dtype, temperature and size of the demo.

    It holds the warm cache and the list of warming requests done, so that a killed demo can continue.
    """

    def __init__(self, *identity: object) -> None:
        key = hashlib.sha256(json.dumps([LAYOUT, *map(str, identity)]).encode()).hexdigest()[:16]
        self.folder = Path(platformdirs.user_cache_dir("precedent")) / "demo" / key
        self._file = self.folder / "warmed.json"

    def warmed(self) -> list[str]:
        """Names of the requests whose completions are stored; empty if the list cannot be read."""
        try:
            names = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def mark_warmed(self, names: Sequence[str]) -> None:
        """Replace the list atomically; the completions themselves are already on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(list(names)), encoding="utf-8")
        temporary.replace(self._file)


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
    desk, begun, before, busy = make_database(seed=0), clock(), read_times(), None
    for number, request in enumerate(wanted, start=1):
        for name in rotated(list(bench.engines), number - 1):
            total = None if adaptive else len(wanted)
            progress.show("measuring (set B)", number - 1, total, f"{request.workflow}, {name}")
            bench.measure(request, desk, name)
        busy = share_of_others(before, read_times())
        progress.say(so_far(with_speedups(bench.runs), busy))
        if adaptive and enough(named(bench.runs), number, clock() - begun):
            break
    return busy


def named(runs: Mapping[str, Run]) -> Iterator[Speedup]:
    """The speed-ups that the verdict names."""
    for name in NAMED:
        yield from speedups(runs[name], runs["plain"]).values()


def enough(found: Iterable[Speedup], number: int, seconds: float) -> bool:
    """Whether to stop: all speed-ups are known within `NARROW`, or time is over."""
    if all(one.uncertainty <= NARROW for one in found):
        return True
    return seconds >= (MEASURING_SECONDS if number >= FEWEST_FOR_INTERVAL else 2 * MEASURING_SECONDS)


def differences(bench: Bench) -> dict[str, Any]:
    """How many requests each way answered as plain decoding did, and the first difference of each other request.

    `logit_gap` is the difference between the two tokens' logits after a plain forward over the common text.
    """
    plain, same, found = bench.runs["plain"].requests, dict[str, list[int]](), list[dict[str, Any]]()
    for name, run in bench.runs.items():
        if name == "plain":
            continue
        places = [first_difference(mine, theirs) for mine, theirs in zip(run.requests, plain, strict=True)]
        same[name] = [places.count(None), len(plain)]
        for number, place in enumerate(places):
            if place is not None:
                context, position, token, plain_token = place
                gap = round(bench.logit_gap(context, token, plain_token), 6)
                found.append({"run": name, "request": number, "position": position, "logit_gap": gap})
    return {"identical_outputs": same, "first_differences": found}


def first_difference(mine: Sequence[Turn], theirs: Sequence[Turn]) -> tuple[list[int], int, int, int] | None:
    """Context, output position and both tokens of the first difference; None if all turns are equal."""
    position = 0
    for turn, plain_turn in zip(mine, theirs, strict=False):
        answer, plain_answer = turn.result.token_ids, plain_turn.result.token_ids
        for i, (token, plain_token) in enumerate(zip(answer, plain_answer, strict=False)):
            if token != plain_token:
                return [*plain_turn.prompt_ids, *plain_answer[:i]], position + i, token, plain_token
        position += len(plain_answer)
    return None
