"""What `precedent bench` compares: one model, an engine per mode, transformers' decoding, and the caches to draft from.

All ways are timed alike: a contestant answers a prompt and returns its tokens with the times of their arrival.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from precedent.cache import Completion, SpeculationCache, prompt_fingerprint, tokenizer_fingerprint
from precedent.cache.embedder import resolve
from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import DraftSession, Request
from precedent.drafters.registry import kind_of, load_draft
from precedent.engine.engine import Engine
from precedent.engine.loading import loaded_draft, loaded_target
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.planning.costs import CostCurve
from precedent.target.model import target_of
from precedent_testing.drafters import NullDrafter, OracleDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Maps prompt ids to the tokens of the plain answer."""

OURS = ("plain", "ours", "ours-cold", "adversarial", "null", "oracle")
POISONED_PER_PROMPT, RANDOM_COMPLETIONS = 4, 32

QUERY_TOKENS = 200
"""Recall's query is this many tokens from the end of the prompt."""

PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer: its tokens, when they arrived, and how many steps came after the first arrival.

    `arrivals` holds pairs of (seconds since the start, tokens that arrived together). Decoding starts after the first
    arrival, so that prefill counts for no contestant. `outside_seconds` is the decoding time outside the target's
    forward passes, None if unknown.
    """

    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    total_seconds: float
    steps: int
    outside_seconds: float | None = None

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] if self.arrivals else self.total_seconds

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first arrival."""
        return len(self.token_ids) - (self.arrivals[0][1] if self.arrivals else 0)

    @property
    def decode_seconds(self) -> float:
        """Seconds after the first arrival."""
        return self.total_seconds - self.first_seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens; 0 for tokens that arrived together."""
        found: list[float] = []
        for (before, _), (seconds, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [seconds - before, *[0.0] * (tokens - 1)]
        return [*[0.0] * (self.arrivals[0][1] - 1), *found] if self.arrivals else []


Contestant = Callable[[Sequence[int]], Timing]
"""Answers a prompt and returns the timing."""


class _Arrivals(BaseStreamer):
    """Records when new tokens arrive; transformers passes the prompt first."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.noted.append((perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersContestant:
    """`model.generate`, plain, with prompt lookup or with an assistant model, on unmodified weights."""

    def __init__(self, model: PreTrainedModel, max_tokens: int, **settings: Any) -> None:
        self._model, self._settings, self._forwards = model, {**settings, "max_new_tokens": max_tokens}, 0
        self._generate: Any = model.generate
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def __call__(self, prompt_ids: Sequence[int]) -> Timing:
        """Answer a prompt greedily."""
        inputs = torch.tensor([prompt_ids], device=self._model.device)
        streamer, self._forwards = _Arrivals(), 0
        started = perf_counter()
        with torch.inference_mode():
            output: Any = self._generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                streamer=streamer,
                **self._settings,
            )
        total = perf_counter() - started
        answer = tuple(output[0, len(prompt_ids) :].tolist())
        arrivals = tuple((seconds - started, tokens) for seconds, tokens in streamer.noted)
        return Timing(answer, arrivals, total, self._forwards - 1)


class OurContestant:
    """One of our engines. Recall's query is the end of the prompt, in place of a chat model's messages."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self.engine, self.sampling = engine, SamplingParams(max_tokens=max_tokens)

    def __call__(self, prompt_ids: Sequence[int], tenant: str = "default") -> Timing:
        """Answer a prompt greedily."""
        query = query_of(self.engine.tokenizer, prompt_ids)
        started, arrivals = perf_counter(), []
        generation = self.engine.submit(prompt_ids, self.sampling, query=query, tenant=tenant)
        for emission in generation:
            if emission.token_ids:
                arrivals.append((perf_counter() - started, len(emission.token_ids)))
        result = generation.result()
        stats = result.stats
        outside = max(0.0, stats.decode_seconds - stats.forward_seconds) * (1 - 1 / stats.num_steps)
        total = arrivals[-1][0]  # the answer ends with its last tokens; the time to store the completion does not count
        return Timing(result.token_ids, tuple(arrivals), total, stats.num_steps - 1, outside)


def query_of(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    """Recall's query: the text at the end of the prompt."""
    return str(tokenizer.decode(list(prompt_ids[-QUERY_TOKENS:]), skip_special_tokens=True))


class OracleOfPrompts:
    """Knows the answer to every measured prompt: an upper bound for any drafter."""

    name = "oracle"

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._answers = answers

    def begin(self, request: Request) -> DraftSession:
        """A session that proposes the known answer."""
        return OracleDrafter(self._answers[request.prompt_ids]).begin(request)

    def close(self) -> None:
        """Nothing to release."""


class Lineup:
    """Loads the target once for our engines, and a second, unmodified copy for transformers; close it at the end.

    An engine or cache that a process leaves open may abort it while the interpreter ends.
    """

    def __init__(self, target: str, options: EngineOptions, max_tokens: int) -> None:
        self._target, self._options, self._max_tokens, self._held = target, options, max_tokens, ExitStack()
        loaded = loaded_target(target, None, options)
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self._draft = loaded_draft(options, loaded.model, self.tokenizer)
        # all engines share it: with CUDA graphs, each separate one would take half of the remaining memory
        self.target = target_of(loaded.model, cuda_graphs=options.cuda_graphs)
        self._embedder = resolve(None)
        self._cost: CostCurve | None = None
        self.cache = self._new_cache()

    def ours(self, cache: SpeculationCache | None = None, **settings: Any) -> OurContestant:
        """A contestant with its own engine. The first engine measures the cost curve; the others start from a copy."""
        cost = None if self._cost is None else copy.deepcopy(self._cost)
        speculation = SpeculationConfig(**{"write_back": False, **settings})
        loop = self._options.loop
        options = EngineOptions(draft_model=self._draft, cache=cache, speculation=speculation, loop=loop)
        engine = Engine(self.target, self.tokenizer, options, name=self._target, cost=cost)
        self._held.callback(engine.close)
        if self._cost is None:
            self._cost = copy.deepcopy(engine.planner.cost)
        return OurContestant(engine, self._max_tokens)

    def plain_answers(self, prompts: Sequence[Sequence[int]]) -> Answers:
        """The answers of plain decoding, from an engine outside the comparison."""
        plain = self.ours(enabled=False)
        with closing(plain.engine):
            return {tuple(prompt): plain(prompt).token_ids for prompt in prompts}

    def contestants(self, modes: Sequence[str], answers: Answers) -> dict[str, Contestant]:
        """The contestant of each mode."""
        ours = {mode: self._ours(mode, answers) for mode in modes if mode in OURS}
        return {**self._transformers(modes), **ours}

    def _ours(self, mode: str, answers: Answers) -> OurContestant:
        if mode == "plain":
            return self.ours(enabled=False)
        if mode in ("null", "oracle"):
            contestant = self.ours(drafters=())
            contestant.engine.add_drafter(NullDrafter() if mode == "null" else OracleOfPrompts(answers))
            contestant.engine.speculation = SpeculationConfig(drafters=(mode,), write_back=False)
            return contestant
        if mode == "adversarial":
            return self.ours(self.poisoned_cache(answers))
        return self.ours(self.cache if mode == "ours" else self._new_cache())

    def _transformers(self, modes: Sequence[str]) -> dict[str, Contestant]:
        wanted, named = [mode for mode in modes if mode not in OURS], self._options.draft_model
        if not wanted:
            return {}
        if self.target.model is None:
            raise ConfigError(f"transformers does not compute this target: leave out {', '.join(wanted)} of --modes")
        if "assisted" in wanted and kind_of(self._draft) is not None:
            raise ConfigError(
                f"mode 'assisted' is transformers', which cannot use {named}: name the other modes with --modes"
            )
        untouched: Any = loaded_target(self._target, None, self._options).model  # our engines pack their linear layers
        settings: dict[str, dict[str, Any]] = {"generate": {}, "prompt-lookup": PROMPT_LOOKUP}
        if named and "assisted" in wanted:
            settings["assisted"] = {"assistant_model": load_draft(named, untouched, self.tokenizer)}
        return {mode: TransformersContestant(untouched, self._max_tokens, **settings[mode]) for mode in wanted}

    def _new_cache(self) -> SpeculationCache:
        cache = SpeculationCache.open(None, embedder=self._embedder)
        self._held.callback(cache.close)
        return cache

    def close(self) -> None:
        """Close all engines, then the caches that they draft from."""
        self._held.close()

    def poisoned_cache(self, answers: Answers) -> SpeculationCache:
        """A misleading cache: wrong answers stored for the measured prompts, and completions of random tokens.

        A wrong answer replaces every second token, so that the token after a match is always wrong.
        """
        cache, choose = self._new_cache(), random.Random(0)
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        for prompt, answer in answers.items():
            query, fingerprint = query_of(self.tokenizer, prompt), prompt_fingerprint(prompt)
            for shift in range(POISONED_PER_PROMPT):
                wrong = [
                    token if place % 2 == shift % 2 else choose.randrange(len(self.tokenizer))
                    for place, token in enumerate(answer)
                ]
                cache.insert(Completion(tuple(wrong), tokenizer, "", query=query, prompt_fingerprint=fingerprint))
        for number in range(RANDOM_COMPLETIONS):
            tokens = tuple(choose.randrange(len(self.tokenizer)) for _ in range(self._max_tokens))
            cache.insert(Completion(tokens, tokenizer, "", query=f"another topic, number {number}"))
        return cache


PER_CALLER = 4
"""Requests per caller in a group; more of them shorten the share of time at its end when some callers are idle."""


def concurrency(
    number: int,
    alone: OurContestant,
    together: OurContestant,
    prompts: Sequence[Sequence[int]],
    progress: Callable[[Sequence[Any]], Any],
) -> dict[str, Any]:
    """Compare the same requests one after the other and `number` at once, in groups; the sides take turns to start.

    Each side has its own engine, so that neither finds the other's prompts prefilled. Each side answers every group
    twice: first with prefill, then with the prompts' keys and values still cached (`prompts_read`). A group holds
    `PER_CALLER` requests for each of `number` callers, fewer if there are not enough prompts.
    """
    size = min(len(prompts) // number, PER_CALLER) * number
    groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
    spent: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for place, group in enumerate(progress(groups)):
        sides = [("alone", alone, 1), ("together", together, number)]
        for side, contestant, width in sides if place % 2 == 0 else reversed(sides):
            for time in (0, 1):
                spent[side, time].append(_answer_all(contestant, group, width))
    counts = {"requests_at_once": number, "requests": len(groups) * size}
    first, again = (_compared(spent["alone", time], spent["together", time]) for time in (0, 1))
    return {**counts, **first, "prompts_read": again}


def _compared(alone: Sequence[tuple[float, int]], together: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Tokens per second of both sides, from each group's seconds and tokens."""
    rates = [[tokens / seconds for seconds, tokens in side] for side in (alone, together)]
    whole = [sum(tokens for _, tokens in side) / sum(seconds for seconds, _ in side) for side in (alone, together)]
    return {
        "tokens_per_second_one_after_the_other": round(whole[0], 2),
        "tokens_per_second_at_once": round(whole[1], 2),
        "ratio": round(median(b / a for a, b in zip(*rates, strict=True)), 3),
    }


def _answer_all(contestant: OurContestant, prompts: Sequence[Sequence[int]], width: int) -> tuple[float, int]:
    """Seconds and tokens for all prompts, asked by `width` callers; a caller that has its answer asks the next."""
    engine, started = contestant.engine, perf_counter()

    def answer(prompt: Sequence[int]) -> int:
        generation = engine.submit(prompt, contestant.sampling, query=query_of(engine.tokenizer, prompt))
        return len(generation.result().token_ids)

    with ThreadPoolExecutor(width) as callers:
        tokens = sum(callers.map(answer, prompts))
    return perf_counter() - started, tokens
