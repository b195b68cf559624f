"""The contestants of `precedent bench`: transformers' decoding and ours, timed in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from precedent.config import SamplingParams
from precedent.drafters import DraftSession, Request
from precedent.engine.engine import Engine
from precedent_testing.drafters import OracleDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
