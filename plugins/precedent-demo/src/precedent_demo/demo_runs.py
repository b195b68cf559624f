"""`precedent demo`: the same requests with several ways of drafting, interleaved, until the speed-ups are known.

Each way has its own engine, planner and cache over the same weights, so that none learns from another. Measured runs
store nothing, with one exception: the plain run's completions go into the cache of `repeat`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import NormalDist
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import platformdirs
import torch
from rich.console import Console

import precedent_demo
from precedent.cache import SpeculationCache
from precedent.cache.database import SCHEMA
from precedent.cli.options import write_json
from precedent.cli.progress import Progress
from precedent.config import SpeculationConfig
from precedent.decoding.stats import GenerationStats, Percentiles
from precedent.drafters import load_draft
from precedent.engine.engine import Engine
from precedent.engine.generation import GenerationResult
from precedent.engine.options import EngineOptions
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.runtime.machine_load import cpu_times, processor, share_of_others
from precedent.target.load.loading import DEMO_TARGET, device_named, load_target
from precedent.target.quantised import is_quantised
from precedent_demo import SYSTEM_PROMPT, block_folder, draft_folder, make_database, make_requests
from precedent_demo.adapted import packaged_target
from precedent_demo.conversation import run_request
from precedent_demo.demo import ORDER_DESK, UNTRAINED_DRAFT, Asked
from precedent_demo.demo_report import FEWEST_FOR_INTERVAL, NAMED, demo_page, show, so_far
from precedent_demo.desk import OrderDesk
from precedent_demo.requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TENANT = "order-desk"

QUANTIZATION = "int8"
"""How the order desk's model is loaded on a CPU: it solves as many requests as in bfloat16, in less time."""

MEMORY = ("recall", "prompt", "template")
"""The library's default drafters without the draft model; `template` proposes the forms of the agent's tool calls."""

DRAFT = ("draft-model",)

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


@dataclass(frozen=True, slots=True)
class Way:
    """One way of drafting: the drafters, the cache, the verification mode, and the models.

    With `other_draft` the other draft model drafts; with `stored` the order desk's model has its stored dtype.
    """

    name: str
    drafters: tuple[str, ...] = ()
    cache: str = ""
    mode: str = "auto"
    other_draft: bool = False
    stored: bool = False


WAYS = (
    Way("plain", cache="B"),
    Way("draft-only", DRAFT),
    Way("cache-only", MEMORY, "A"),
    Way("both", MEMORY + DRAFT, "A"),
    Way("repeat", MEMORY + DRAFT, "B"),
)
"""Cache A holds other requests of the same workflows; cache B holds these requests as well."""


def ways_of(temperature: float, full: bool, other_draft: bool = False, stored: bool = False) -> tuple[Way, ...]:
    """The ways to measure, in the order of the table.

    When sampling, `both` is also verified topdown, which shows what lazy verification gains. In full, recall also
    drafts alone: in `cache-only`, templates take credit for tokens that the cache proposed as well.
    """
    ways = list(WAYS)
    if temperature > 0:
        ways.append(Way("both, topdown", MEMORY + DRAFT, "A", "topdown"))
    if full:
        ways.append(Way("recall-only", ("recall",), "A"))
    if other_draft:
        ways.append(Way("draft-only, other", DRAFT, other_draft=True))
        ways.append(Way("both, other", MEMORY + DRAFT, "A", other_draft=True))
    if stored:
        ways.append(Way("plain, bfloat16", stored=True))
        ways.append(Way("both, bfloat16", MEMORY + DRAFT, "A", stored=True))
    return tuple(ways)


class Sample(NamedTuple):
    """One request: the tokens that came out, and the seconds that they took."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: the prompt and the result."""

    prompt_ids: tuple[int, ...]
    result: GenerationResult


@dataclass(slots=True)
class Run:
    """All measured requests of one way."""

    name: str
    requests: list[list[Turn]] = field(default_factory=list)
    solved: int = 0

    def samples(self, seconds: str) -> list[Sample]:
        """Each request's output tokens and its seconds, summed over its turns; `seconds` is a field of their stats."""
        requests = [[turn.result.stats for turn in turns] for turns in self.requests]
        return [
            Sample(sum(one.num_output_tokens for one in stats), sum(getattr(one, seconds) for one in stats))
            for stats in requests
        ]

    def as_dict(self) -> dict[str, Any]:
        """The run under the keys of the `--json` contract."""
        stats: list[GenerationStats] = [turn.result.stats for turns in self.requests for turn in turns]

        def total(name: str) -> Any:
            return sum(getattr(one, name) for one in stats)

        def per_step(name: str) -> float:
            return round(total(name) / steps * 1e3, 3) if steps else 0.0

        tokens, steps, decode = total("num_output_tokens"), total("num_steps"), total("decode_seconds")
        seconds = [request.seconds for request in self.samples("total_seconds")]
        percentiles = Percentiles.of(seconds)
        return {
            "name": self.name,
            "requests": len(self.requests),
            "tokens": tokens,
            "steps": steps,
            "tokens_per_step": round(tokens / steps, 3) if steps else 0.0,
            "prefill_seconds": round(total("prefill_seconds"), 3),
            "decode_seconds": round(decode, 3),
            "tokens_per_second": round(tokens / decode, 2) if decode else 0.0,
            "request_seconds": round(sum(seconds), 3),
            "request_seconds_p50": round(percentiles.p50, 3),
            "request_seconds_p95": round(percentiles.p95, 3),
            "num_draft_tokens": total("num_draft_tokens"),
            "num_accepted_tokens": total("num_accepted_tokens"),
            "accepted_by_source": dict(sum((one.accepted_by_source for one in stats), Counter())),
            "solved": self.solved,
            "milliseconds_per_step": {
                "forward": per_step("forward_seconds"),
                "drafting": per_step("draft_seconds"),
                "draft_model": per_step("draft_model_seconds"),
                "verification": per_step("verify_seconds"),
            },
        }


def with_speedups(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """All runs under the keys of the `--json` contract, each with its speed-ups over plain and their intervals.

    `decode` is the speed-up of decoding, `request` that of whole requests, from submission to the last token.
    """
    found = []
    for run in runs.values():
        found.append(run.as_dict())
        for what, seconds in (("decode", "decode_seconds"), ("request", "total_seconds")):
            found[-1] |= speedup_keys(f"{what}_speedup", run.samples(seconds), runs["plain"].samples(seconds))
    return found


def speedup(mine: Sequence[Sample], plain: Sequence[Sample]) -> tuple[float, tuple[float, float] | None]:
    """The ratio of two rates in tokens per second, and its 95 % confidence interval, None if unknown.

    Compares two ways that served the same requests in the same order; 0 without tokens or time on either side. The
    rates are totals of tokens over totals of seconds. The spread of the ratio's logarithm is that of each request's
    shares in the four totals (the delta method for ratios of totals), so what makes a request slow for both ways does
    not widen the interval.
    """
    totals = [Sample(sum(one.tokens for one in side), sum(one.seconds for one in side)) for side in (mine, plain)]
    if not all(tokens > 0 and seconds > 0 for tokens, seconds in totals):
        return 0.0, None
    ratio = totals[0].tokens / totals[0].seconds / (totals[1].tokens / totals[1].seconds)
    number = len(mine)
    if number < FEWEST_FOR_INTERVAL:
        return ratio, None
    shares = [_share(one, totals[0]) - _share(other, totals[1]) for one, other in zip(mine, plain, strict=True)]
    error = sqrt(number / (number - 1) * sum(share * share for share in shares))
    reach = student_quantile(number - 1) * error
    return ratio, (exp(log(ratio) - reach), exp(log(ratio) + reach))


def _share(sample: Sample, total: Sample) -> float:
    return sample.tokens / total.tokens - sample.seconds / total.seconds


def student_quantile(degrees: int) -> float:
    """The 0.975 quantile of Student's t distribution, within 1 % from 3 degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))


def speedup_keys(name: str, mine: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Ratio and interval for JSON, under `name` and `name_interval`."""
    ratio, interval = speedup(mine, plain)
    return {name: round(ratio, 3), f"{name}_interval": interval and [round(end, 3) for end in interval]}


class Bench:
    """The model, caches and engines of one demo; `other_draft` and `stored` serve the ways that name them."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        draft_model: PreTrainedModel | None,
        cache: SpeculationCache,
        ways: Sequence[Way],
        *,
        temperature: float,
        max_tokens: int,
        other_draft: PreTrainedModel | None = None,
        stored: tuple[PreTrainedModel, PreTrainedModel] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._draft, self._other_draft, self._stored = draft_model, other_draft, stored
        self._settings = {"temperature": temperature, "max_tokens": max_tokens, "tenant": TENANT}
        self._turns: list[Turn] = []
        self._costs: dict[bool, CostCurve] = {}  # the first engine of a target measures it, the others share it
        self._repeat_cache = SpeculationCache.open(None)
        self.warm_cache = cache
        self.warm_engine = self._engine(Way("warm", MEMORY + DRAFT, "A"), write_back=True)
        self.engines = {way.name: self._engine(way, write_back=way.name == "plain") for way in ways}
        self.runs = {way.name: Run(way.name) for way in ways}

    def _engine(self, way: Way, *, write_back: bool) -> Engine:
        model, draft = self._model, self._other_draft if way.other_draft else self._draft
        if way.stored and self._stored is not None:
            model, draft = self._stored
        options = EngineOptions(
            draft_model=draft if "draft-model" in way.drafters else None,
            cache={"A": self.warm_cache, "B": self._repeat_cache}.get(way.cache),
            speculation=SpeculationConfig(
                enabled=bool(way.drafters), drafters=way.drafters, mode=way.mode, write_back=write_back
            ),
        )
        keep = lambda prompt_ids, result: self._turns.append(Turn(prompt_ids, result))  # noqa: E731
        cost = self._costs.get(way.stored)
        made = Engine(model, self._tokenizer, options, name=self._name, cost=cost, on_result=keep)
        self._costs.setdefault(way.stored, made.planner.cost)
        return made

    def copy_warm_cache(self) -> None:
        """Copy the warm cache's completions into the cache of `repeat`."""
        for stored in self.warm_cache.since(TENANT, self.warm_engine.tokenizer_fingerprint):
            self._repeat_cache.insert(stored)

    def warm(self, request: Request, desk: OrderDesk, middleware: Sequence[Any] = ()) -> None:
        """Run one request of set A and store its completions."""
        run_request(self.chat_model(self.warm_engine), request, desk, middleware=middleware)

    def measure(self, request: Request, desk: OrderDesk, name: str) -> None:
        """Run one request of set B in the way called `name`."""
        self._turns.clear()
        self.runs[name].solved += run_request(self.chat_model(self.engines[name]), request, desk).solved_by_model
        self.runs[name].requests.append(list(self._turns))

    def chat_model(self, engine: Engine) -> ChatPrecedent:
        """The chat model of the demo's agents on one of the engines."""
        return ChatPrecedent.from_engine(engine, **self._settings)

    def logit_gap(self, context: Sequence[int], token: int, other: int) -> float:
        """The difference between two tokens' logits after a plain forward over `context`."""
        target = self.warm_engine.target
        slot = target.new_slot()
        target.prefill(slot, context)
        row = target.plain_step(slot)[0].float()
        return abs(float(row[token] - row[other]))

    def machine(self) -> dict[str, Any]:
        """The target, and the machine that it ran on."""
        cost = self.engines["both"].planner.cost.as_dict()
        return {
            "target": self._name,
            "dtype": _dtype_of(self._model),
            "device": str(self._model.device),
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "step_milliseconds_by_width": {width: round(milliseconds, 1) for width, milliseconds in cost.items()},
        }

    def close(self) -> None:
        """Stop all engines."""
        for engine in (self.warm_engine, *self.engines.values()):
            engine.close()


def _dtype_of(model: PreTrainedModel) -> str:
    return QUANTIZATION if is_quantised(model) else str(model.dtype).removeprefix("torch.")


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The ways in a new order for each request, so that a slow minute affects all alike; `repeat` follows `plain`."""
    shift = number % len(names)
    order = [*names[shift:], *names[:shift]]
    if "repeat" in order and order.index("repeat") < order.index("plain"):
        order.remove("repeat")
        order.append("repeat")
    return order


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
        results = results_of(bench, asked.temperature, machine, warmed)
        progress.rest()
        show(Console(), results)
        write_json(json_file, results)
        if html:
            tokenizer = bench.engines["plain"].tokenizer
            page = demo_page(results, bench.runs, lambda ids: str(tokenizer.decode(list(ids))))
            html.write_text(page, encoding="utf-8")


def results_of(bench: Bench, temperature: float, machine: dict[str, Any], warmed: int) -> dict[str, Any]:
    """The JSON of `precedent demo`. Sampled texts differ by chance, so no equal ones are counted."""
    both, cache = (bench.runs[name].samples("decode_seconds") for name in ("both", "cache-only"))
    compared = {"identical_outputs": {}, "first_differences": []} if temperature else differences(bench)
    return {
        "temperature": temperature,
        "machine": machine,
        "runs": with_speedups(bench.runs),
        "both_over_cache": speedup_keys("decode_speedup", both, cache),
        **compared,
        "warming_requests": warmed,
    }


def loaded(asked: Asked, progress: Progress, only: Collection[str] = ()) -> tuple[Bench, DemoState, dict[str, str]]:
    """The model with its caches and engines, the state that earlier demos left, and the draft models' names.

    `only` are the names of the ways to measure, all without any.
    """
    own = asked.target == ORDER_DESK
    progress.show(f"loading {asked.target}", note="built on the first run" if own else "")
    drafts = {"draft_model": asked.draft_model or (str(draft_folder()) if own else UNTRAINED_DRAFT)}
    if own and asked.full and asked.draft_model is None:
        drafts["other_draft_model"] = str(block_folder())
    source = packaged_target() if own else asked.target
    # the packaged model's own template takes no tools; this one is what the library would take in its place
    template = asked.chat_template or ("hermes" if asked.target in (ORDER_DESK, DEMO_TARGET) else None)
    eight_bits = own and asked.dtype is None and device_named(asked.device).type == "cpu"
    model, tokenizer = load_target(
        source, device=asked.device, dtype=asked.dtype, quantization=QUANTIZATION if eight_bits else None,
        chat_template=template,
    )  # fmt: skip
    models = {role: load_draft(draft, model, tokenizer) for role, draft in drafts.items()}
    stored = None
    if eight_bits and asked.full:
        wide, _ = load_target(source, device="cpu")
        stored = wide, load_draft(drafts["draft_model"], wide, tokenizer)
    with_actions = asked.tool_latency is not None
    state = DemoState(source, asked.draft_model, _dtype_of(model), asked.temperature, asked.full, with_actions)
    if asked.fresh:
        shutil.rmtree(state.folder, ignore_errors=True)
    progress.show("starting engines and measuring this machine's cost per step")
    cache = SpeculationCache.open(state.folder / "cache")
    cache.warm_up()  # loading the embedder later would distort the measurement
    ways = ways_of(asked.temperature, asked.full, "other_draft_model" in models, stored is not None)
    bench = Bench(
        model, tokenizer, asked.target, models["draft_model"], cache,
        [way for way in ways if not only or way.name in only],
        temperature=asked.temperature, max_tokens=precedent_demo.MAX_TOKENS_PER_TURN,
        other_draft=models.get("other_draft_model"), stored=stored,
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
        if name == "plain" or name.endswith("bfloat16"):  # another model's answers differ
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
