"""What `precedent demo` measures: the same requests with several ways of drafting, interleaved.

Each way has its own engine, planner and cache over the same weights, so that none learns from another. Measured runs
store nothing, with one exception: the plain run's completions go into the cache of `repeat`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from precedent.cache import Completion, SpeculationCache
from precedent.cli.percentiles import percentiles
from precedent.cli.speedup import Sample, Speedup, speedup
from precedent.config import SpeculationConfig
from precedent.decoding.stats import GenerationStats
from precedent.engine.engine import Engine
from precedent.engine.generation import GenerationResult
from precedent.engine.options import EngineOptions
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.runtime.processor import processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent_demo import OrderDesk, Request

TENANT = "order-desk"
MEMORY = ("recall", "prompt", "template")
"""The library's default drafters without the draft model; `template` proposes the forms of the agent's tool calls."""


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
    Way("draft-only", ("draft-model",)),
    Way("cache-only", MEMORY, "A"),
    Way("both", (*MEMORY, "draft-model"), "A"),
    Way("repeat", (*MEMORY, "draft-model"), "B"),
)
"""Cache A holds other requests of the same workflows; cache B holds these requests as well."""

TOPDOWN = Way("both, topdown", (*MEMORY, "draft-model"), "A", "topdown")
"""Measured as well when sampling: compared with `both`, it shows what lazy verification gains."""

RECALL_ONLY = Way("recall-only", ("recall",), "A")
"""The semantic cache alone: in `cache-only`, templates take credit for tokens that the cache proposed as well."""

OTHER_DRAFT = (
    Way("draft-only, other", ("draft-model",), other_draft=True),
    Way("both, other", (*MEMORY, "draft-model"), "A", other_draft=True),
)
"""Measured where there is another draft model: `draft-only` and `both` with it."""


def ways_of(temperature: float, full: bool, other_draft: bool = False) -> tuple[Way, ...]:
    """The ways to measure, in the order of the table."""
    more = (*([TOPDOWN] if temperature > 0 else []), *([RECALL_ONLY] if full else []))
    return (*WAYS, *more, *(OTHER_DRAFT if other_draft else ()))


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

    @property
    def stats(self) -> list[GenerationStats]:
        """The statistics of each assistant turn."""
        return [turn.result.stats for turns in self.requests for turn in turns]

    @property
    def decoding(self) -> list[Sample]:
        """Each request's output tokens and the seconds of decoding them."""
        return [_sample(turns, lambda stats: stats.decode_seconds) for turns in self.requests]

    @property
    def whole(self) -> list[Sample]:
        """Each request's output tokens and the seconds from submission to the last token, summed over its turns."""
        return [_sample(turns, lambda stats: stats.total_seconds) for turns in self.requests]

    def as_dict(self) -> dict[str, Any]:
        """The run under the keys of the `--json` contract."""
        stats = self.stats
        tokens, steps = sum(s.num_output_tokens for s in stats), sum(s.num_steps for s in stats)
        decode = sum(s.decode_seconds for s in stats)
        seconds = [request.seconds for request in self.whole]
        p50, p95 = percentiles(seconds)
        return {
            "name": self.name,
            "requests": len(self.requests),
            "tokens": tokens,
            "steps": steps,
            "tokens_per_step": round(tokens / steps, 3) if steps else 0.0,
            "prefill_seconds": round(sum(s.prefill_seconds for s in stats), 3),
            "decode_seconds": round(decode, 3),
            "tokens_per_second": round(tokens / decode, 2) if decode else 0.0,
            "request_seconds": round(sum(seconds), 3),
            "request_seconds_p50": round(p50, 3),
            "request_seconds_p95": round(p95, 3),
            "num_draft_tokens": sum(s.num_draft_tokens for s in stats),
            "num_accepted_tokens": sum(s.num_accepted_tokens for s in stats),
            "accepted_by_source": dict(sum((s.accepted_by_source for s in stats), Counter())),
            "solved": self.solved,
            "milliseconds_per_step": {
                "forward": _per_step(sum(s.forward_seconds for s in stats), steps),
                "drafting": _per_step(sum(s.draft_seconds for s in stats), steps),
                "draft_model": _per_step(sum(s.draft_model_seconds for s in stats), steps),
                "verification": _per_step(sum(s.verify_seconds for s in stats), steps),
            },
        }


def speedups(run: Run, plain: Run) -> dict[str, Speedup]:
    """How many times as fast as plain a run is: in decoding, and from submission to the last token of requests."""
    return {"decode": speedup(run.decoding, plain.decoding), "request": speedup(run.whole, plain.whole)}


def with_speedups(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """All runs under the keys of the `--json` contract, each with its speed-ups over plain and their intervals."""
    return [run.as_dict() | _speeds(run, runs["plain"]) for run in runs.values()]


def _speeds(run: Run, plain: Run) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for what, found in speedups(run, plain).items():
        shown[f"{what}_speedup"] = round(found.ratio, 3)
        interval = found.interval and [round(end, 3) for end in found.interval]
        shown[f"{what}_speedup_interval"] = interval
    return shown


def _sample(turns: Sequence[Turn], seconds: Callable[[GenerationStats], float]) -> Sample:
    stats = [turn.result.stats for turn in turns]
    return Sample(sum(one.num_output_tokens for one in stats), sum(seconds(one) for one in stats))


def _per_step(seconds: float, steps: int) -> float:
    return round(seconds / steps * 1e3, 3) if steps else 0.0


class Bench:
    """The model, caches and engines of one demo.

    `other_draft` drafts in the ways that name it; `more_caches` are those, by name, that ways name besides A and B.
    """

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
        more_caches: Mapping[str, SpeculationCache] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._draft, self._other_draft = draft_model, other_draft
        self._settings = {"temperature": temperature, "max_tokens": max_tokens, "tenant": TENANT}
        self._turns: list[Turn] = []
        self._cost: CostCurve | None = None  # the first engine measures it, the others share it
        self._caches = {**(more_caches or {}), "A": cache, "B": SpeculationCache.open(None)}
        self.warm_engine = self._engine(Way("warm", (*MEMORY, "draft-model"), "A"), write_back=True)
        self._cost = self.warm_engine.planner.cost
        self.engines = {way.name: self._engine(way, write_back=way.name == "plain") for way in ways}
        self.runs = {way.name: Run(way.name) for way in ways}

    def _engine(self, way: Way, *, write_back: bool) -> Engine:
        draft = self._other_draft if way.other_draft else self._draft
        speculation = SpeculationConfig(
            enabled=bool(way.drafters), drafters=way.drafters, mode=way.mode, write_back=write_back
        )
        options = EngineOptions(
            draft_model=draft if "draft-model" in way.drafters else None,
            cache=self._caches.get(way.cache),
            speculation=speculation,
        )
        return Engine(
            self._model,
            self._tokenizer,
            options,
            name=self._name,
            cost=self._cost,
            on_result=lambda prompt_ids, result: self._turns.append(Turn(prompt_ids, result)),
        )

    @property
    def warm_cache(self) -> SpeculationCache:
        """The cache that holds other requests of the same workflows."""
        return self._caches["A"]

    def copy_warm_cache(self) -> None:
        """Copy the warm cache's completions into the cache of `repeat`."""
        fingerprint = self.warm_engine.tokenizer_fingerprint
        for stored in self._caches["A"].since(TENANT, fingerprint):
            self._caches["B"].insert(
                Completion(
                    token_ids=stored.token_ids,
                    tokenizer=fingerprint,
                    model=stored.model,
                    tenant=TENANT,
                    query=stored.query,
                    prompt_fingerprint=stored.prompt_fingerprint,
                    tools=stored.tools,
                    workflow_step=stored.workflow_step,
                    text=stored.text,
                )
            )

    def warm(self, request: Request, desk: OrderDesk) -> None:
        """Run one request of set A and store its completions."""
        self._converse(self.warm_engine, request, desk)

    def measure(self, request: Request, desk: OrderDesk, name: str) -> None:
        """Run one request of set B in the way called `name`."""
        turns, solved = self._converse(self.engines[name], request, desk)
        self.runs[name].requests.append(turns)
        self.runs[name].solved += solved

    def _converse(self, engine: Engine, request: Request, desk: OrderDesk) -> tuple[list[Turn], bool]:
        from precedent_demo import run_request

        self._turns.clear()
        transcript = run_request(self.chat_model(engine), request, desk)
        return list(self._turns), transcript.solved_by_model

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
        return {
            "target": self._name,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "step_milliseconds_by_width": {
                width: round(milliseconds, 1)
                for width, milliseconds in self.engines["both"].planner.cost.as_dict().items()
            },
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
