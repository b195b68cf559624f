"""The contestants of `precedent bench`: transformers' own decoding and ours, timed in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from precedent.config import SamplingParams
from precedent.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUERY_TOKENS = 200
"""Tokens of the prompt's end by which recall is queried."""

PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer. Decoding is what comes after the first burst of tokens, so prefill counts for nobody."""

    token_ids: tuple[int, ...]
    first_burst: int
    first_seconds: float
    total_seconds: float
    steps: int

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first burst."""
        return len(self.token_ids) - self.first_burst

    @property
    def decode_seconds(self) -> float:
        """Seconds after the first burst."""
        return self.total_seconds - self.first_seconds


Contestant = Callable[[Sequence[int]], Timing]
"""Answers a prompt and says how long it took."""


class _FirstToken(BaseStreamer):
    """Notes when the first new tokens arrive; transformers puts the prompt in first."""

    def __init__(self) -> None:
        self.seconds, self.burst, self._puts = 0.0, 0, 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds, self.burst = perf_counter(), value.numel()

    def end(self) -> None:
        pass


class TransformersContestant:
    """`model.generate`, plain, by prompt lookup, or with an assistant model, on weights that nobody has touched."""

    def __init__(self, model: PreTrainedModel, max_tokens: int, **settings: Any) -> None:
        self._model, self._settings, self._forwards = model, {**settings, "max_new_tokens": max_tokens}, 0
        self._generate: Any = model.generate
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def __call__(self, prompt_ids: Sequence[int]) -> Timing:
        """Greedy answer to a prompt."""
        inputs = torch.tensor([prompt_ids], device=self._model.device)
        streamer, self._forwards = _FirstToken(), 0
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
        return Timing(answer, streamer.burst, streamer.seconds - started, total, self._forwards - 1)


class OurContestant:
    """An engine of ours. Recall is queried by the prompt's own end, as the text that a chat model would be asked."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine, self._sampling = engine, SamplingParams(max_tokens=max_tokens)

    def __call__(self, prompt_ids: Sequence[int]) -> Timing:
        """Greedy answer to a prompt."""
        end_of_prompt = list(prompt_ids[-QUERY_TOKENS:])
        query = str(self._engine.tokenizer.decode(end_of_prompt, skip_special_tokens=True))
        started, first_seconds, first_burst = perf_counter(), 0.0, 0
        generation = self._engine.submit(prompt_ids, self._sampling, query=query)
        for emission in generation:
            if not first_burst:
                first_seconds, first_burst = perf_counter() - started, len(emission.token_ids)
        result = generation.result()
        # the emission of the last tokens ends the answer; storing the completion is not part of it
        total = result.stats.total_seconds
        return Timing(result.token_ids, first_burst, first_seconds, total, result.stats.num_steps - 1)
