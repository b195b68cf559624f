"""What `precedent demo` measures: the same requests with several ways of drafting, interleaved.

Each way has its own engine, planner and cache over the same weights, so that none learns from another. Measured runs
store nothing, with one exception: the plain run's completions go into the cache of `repeat`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.decoding.stats import GenerationStats, Percentiles
from precedent.engine.engine import Engine
from precedent.engine.generation import GenerationResult
from precedent.engine.options import EngineOptions
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.runtime.machine_load import processor
from precedent_demo.conversation import run_request
from precedent_demo.desk import OrderDesk
from precedent_demo.requests import Request
from precedent_demo.speedup import Sample, speedup

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TENANT = "order-desk"
MEMORY = ("recall", "prompt", "template")
"""The library's default drafters without the draft model; `template` proposes the forms of the agent's tool calls."""

DRAFT = ("draft-model",)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of drafting: the drafters, the cache, the verification mode, and whether the other draft model drafts."""

    name: str
    drafters: tuple[str, ...] = ()
    cache: str = ""
    mode: str = "auto"
    other_draft: bool = False


WAYS = (
    Way("plain", cache="B"),
    Way("draft-only", DRAFT),
    Way("cache-only", MEMORY, "A"),
    Way("both", MEMORY + DRAFT, "A"),
    Way("repeat", MEMORY + DRAFT, "B"),
)
"""Cache A holds other requests of the same workflows; cache B holds these requests as well."""


def ways_of(temperature: float, full: bool, other_draft: bool = False) -> tuple[Way, ...]:
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
    return tuple(ways)


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


def speedup_keys(name: str, mine: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Ratio and interval for JSON, under `name` and `name_interval`."""
    ratio, interval = speedup(mine, plain)
    return {name: round(ratio, 3), f"{name}_interval": interval and [round(end, 3) for end in interval]}


class Bench:
    """The model, caches and engines of one demo; `other_draft` drafts in the ways that name it."""

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
    ) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._draft, self._other_draft = draft_model, other_draft
        self._settings = {"temperature": temperature, "max_tokens": max_tokens, "tenant": TENANT}
        self._turns: list[Turn] = []
        self._cost: CostCurve | None = None  # the first engine measures it, the others share it
        self._repeat_cache = SpeculationCache.open(None)
        self.warm_cache = cache
        self.warm_engine = self._engine(Way("warm", MEMORY + DRAFT, "A"), write_back=True)
        self._cost = self.warm_engine.planner.cost
        self.engines = {way.name: self._engine(way, write_back=way.name == "plain") for way in ways}
        self.runs = {way.name: Run(way.name) for way in ways}

    def _engine(self, way: Way, *, write_back: bool) -> Engine:
        draft = self._other_draft if way.other_draft else self._draft
        options = EngineOptions(
            draft_model=draft if "draft-model" in way.drafters else None,
            cache={"A": self.warm_cache, "B": self._repeat_cache}.get(way.cache),
            speculation=SpeculationConfig(
                enabled=bool(way.drafters), drafters=way.drafters, mode=way.mode, write_back=write_back
            ),
        )
        keep = lambda prompt_ids, result: self._turns.append(Turn(prompt_ids, result))  # noqa: E731
        return Engine(self._model, self._tokenizer, options, name=self._name, cost=self._cost, on_result=keep)

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
            "dtype": str(self._model.dtype).removeprefix("torch."),
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


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The ways in a new order for each request, so that a slow minute affects all alike; `repeat` follows `plain`."""
    shift = number % len(names)
    order = [*names[shift:], *names[:shift]]
    if "repeat" in order and order.index("repeat") < order.index("plain"):
        order.remove("repeat")
        order.append("repeat")
    return order
