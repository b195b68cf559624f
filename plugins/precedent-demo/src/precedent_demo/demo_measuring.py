"""Runs `precedent demo`: loads, warms the cache, measures until the speed-ups are known, and compares the answers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import platformdirs
from rich.console import Console

import precedent_demo
from precedent.cache import SpeculationCache
from precedent.cache.database import SCHEMA
from precedent.cli.options import write_json
from precedent.cli.progress import Progress
from precedent.drafters import load_draft
from precedent.runtime.machine_load import cpu_times, share_of_others
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent_demo import SYSTEM_PROMPT, block_folder, draft_folder, make_database, make_requests
from precedent_demo.adapted import packaged_target
from precedent_demo.demo import ORDER_DESK, UNTRAINED_DRAFT, Asked
from precedent_demo.demo_report import NAMED, demo_page, show, so_far
from precedent_demo.demo_runs import Bench, Turn, rotated, ways_of, with_speedups
from precedent_demo.requests import Request
from precedent_demo.speedup import FEWEST_FOR_INTERVAL

SHIPPED = {
    str(draft_folder()): "the order desk's own, a chain of two layers",
    str(block_folder()): "the order desk's own, a block of eight positions",
}
"""What results call the packaged draft models."""

WARMING_REQUESTS, FEWEST_WARMED = 16, 6
"""Requests that fill the cache by default, and on a machine where `WARMING_SECONDS` do not suffice for more."""

WARMING_SECONDS = 45.0

MEASURING_SECONDS = 120.0
"""Measuring ends after this time; after up to twice as long if there are too few requests for an interval by then."""

NARROW = 0.1
"""Measuring ends earlier once each speed-up that the verdict names is known within this share."""


def run_demo(asked: Asked, progress: Progress, json_file: Path | None, html: Path | None) -> None:
    """Warm, measure, compare, and hand out the results."""
    adaptive = not asked.full and asked.requests is None
    others, own = (make_requests(name, full=asked.full, seed=0) for name in ("A", "B"))
    if adaptive:
        others = others[:WARMING_REQUESTS]
    elif asked.requests is not None:
        others, own = others[: 2 * asked.requests], own[: asked.requests]
    bench, state, drafts = loaded(asked, progress)
    with closing(bench):
        warmed = warm(bench, state, others, progress, seconds=WARMING_SECONDS if adaptive else inf)
        bench.copy_warm_cache()
        busy = measure(bench, own, progress, adaptive=adaptive)
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
    if own and asked.full and asked.draft_model is None:
        drafts["other_draft_model"] = str(block_folder())
    source = packaged_target() if own else asked.target
    # the packaged model's own template takes no tools; this one is what the library would take in its place
    template = asked.chat_template or ("hermes" if asked.target in (ORDER_DESK, DEMO_TARGET) else None)
    model, tokenizer = load_target(source, device=asked.device, dtype=asked.dtype, chat_template=template)
    models = {role: load_draft(draft, model, tokenizer) for role, draft in drafts.items()}
    with_actions = asked.tool_latency is not None
    state = DemoState(source, asked.draft_model, model.dtype, asked.temperature, asked.full, with_actions)
    if asked.fresh:
        shutil.rmtree(state.folder, ignore_errors=True)
    progress.show("starting engines and measuring this machine's cost per step")
    cache = SpeculationCache.open(state.folder / "cache")
    cache.warm_up()  # loading the embedder later would distort the measurement
    ways = ways_of(asked.temperature, asked.full, "other_draft_model" in models)
    bench = Bench(
        model, tokenizer, asked.target, models["draft_model"], cache,
        [way for way in ways if not with_actions or way.name in ("plain", "both")],
        temperature=asked.temperature, max_tokens=precedent_demo.MAX_TOKENS_PER_TURN,
        other_draft=models.get("other_draft_model"),
    )  # fmt: skip
    return bench, state, {role: SHIPPED.get(draft, draft) for role, draft in drafts.items()}


class DemoState:
    """A folder in the user's cache folder with the warm cache and the names of the requests that it holds.

    So a killed demo can continue. There is one folder for each setting of the demo, and a new one when the form of
    caches, the system prompt or the requests change.
    """

    def __init__(self, *setting: object) -> None:
        fits = repr((SCHEMA, SYSTEM_PROMPT, make_requests("A", full=True), *map(str, setting)))
        key = hashlib.sha256(fits.encode()).hexdigest()[:16]
        self.folder = Path(platformdirs.user_cache_dir("precedent")) / "demo" / key
        self._file = self.folder / "warmed.json"

    def warmed(self) -> list[str]:
        """Names of the requests whose completions are stored; empty if the list cannot be read."""
        try:
            return list(map(str, json.loads(self._file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            return []

    def mark_warmed(self, names: Sequence[str]) -> None:
        """Replace the list; the completions themselves are already on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(list(names)), encoding="utf-8")


def warm(
    bench: Bench,
    state: DemoState,
    wanted: Sequence[Request],
    progress: Progress,
    *,
    seconds: float = inf,
    middleware: Sequence[Any] = (),
) -> int:
    """Run set A to fill the cache, for about `seconds`; returns how many requests the cache holds.

    Requests that an earlier demo completed are not run again.
    """
    desk, begun = make_database(seed=0), perf_counter()
    done = [name for name in state.warmed() if name in {request.request_id for request in wanted}]
    for request in wanted:
        if request.request_id in done:
            continue
        if len(done) >= FEWEST_WARMED and perf_counter() - begun > seconds:
            break
        progress.show("warming the cache (set A)", len(done), len(wanted), request.workflow)
        bench.warm(request, desk, middleware)
        done.append(request.request_id)
        state.mark_warmed(done)
    progress.show("warming the cache (set A)", len(done), len(wanted))
    return len(done)


def measure(bench: Bench, wanted: Sequence[Request], progress: Progress, *, adaptive: bool) -> float | None:
    """Run set B (other requests of the same workflows), each once in every way; shows the figures after each request.

    Returns the share of processor time that other programs took meanwhile, None if unknown.
    """
    desk, begun, before, busy = make_database(seed=0), perf_counter(), cpu_times(), None
    for number, request in enumerate(wanted, start=1):
        for name in rotated(list(bench.engines), number - 1):
            total = None if adaptive else len(wanted)
            progress.show("measuring (set B)", number - 1, total, f"{request.workflow}, {name}")
            bench.measure(request, desk, name)
        busy, runs = share_of_others(before, cpu_times()), with_speedups(bench.runs)
        progress.say(so_far(runs, busy))
        if adaptive and enough(runs, perf_counter() - begun):
            break
    return busy


def enough(runs: Sequence[Mapping[str, Any]], seconds: float) -> bool:
    """Whether to stop: all speed-ups that the verdict names are known within `NARROW`, or time is over."""
    named = [(run, f"{what}_speedup") for run in runs if run["name"] in NAMED for what in ("decode", "request")]
    intervals = [(run[key], run[f"{key}_interval"]) for run, key in named]
    if all(interval and interval[1] <= (1 + NARROW) * ratio for ratio, interval in intervals):
        return True
    return seconds >= (MEASURING_SECONDS if runs[0]["requests"] >= FEWEST_FOR_INTERVAL else 2 * MEASURING_SECONDS)


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
