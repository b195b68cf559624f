"""The target as teacher: it writes texts, and gives its distribution at each position of a text."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.planning.costs import CostCurve
from precedent.runtime.instructions import native_bfloat16
from precedent_drafts.training.head import OutputHead, Reader
from precedent_drafts.training.prompts import Prompt
from precedent_drafts.training.texts import Lesson, Shard, Text

AT_ONCE = 16
"""Number of requests sampled together."""

ROWS_AT_ONCE = 256
"""Number of full-vocabulary logit rows held at a time."""


class Author:
    """Samples continuations without speculation, in a private engine; the same seeds give the same texts."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        plain = SpeculationConfig(enabled=False, write_back=False)
        options = EngineOptions(speculation=plain, limits=EngineLimits(max_running=AT_ONCE))
        self._engine = Engine(model, tokenizer, options, name="teacher", cost=CostCurve())
        self._temperature = temperature

    def texts(self, contexts: Sequence[Prompt], seeds: Sequence[int], max_tokens: int) -> list[Text]:
        """Continue each context by at most `max_tokens`; skips contexts that leave no room and empty answers."""
        room = self._engine.context_length - 1
        running = [
            (context, self._engine.submit(context, SamplingParams(self._temperature, seed=seed, max_tokens=max_tokens)))
            for context, seed in zip(contexts, seeds, strict=True)
            if len(context) < room
        ]
        answers = [(context, generation.result().token_ids) for context, generation in running]
        return [Text((*context, *answer), len(answer)) for context, answer in answers if answer]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class Teacher:
    """Runs the target over texts and keeps what a draft has to learn from them."""

    def __init__(self, target: PreTrainedModel) -> None:
        self._dtype, self._reader = target.dtype, Reader(fast_reading(target))
        self._head = OutputHead(target, torch.float64 if target.dtype == torch.float64 else torch.float32)

    @torch.no_grad()
    def shard(self, texts: Sequence[Text]) -> Shard:
        """Make the lessons of some texts, on the CPU."""
        frequencies = torch.zeros(self._head.weight.shape[0], device=self._head.weight.device)
        lessons = tuple(self._lesson(text, frequencies) for text in texts)
        return Shard(lessons, frequencies.cpu())

    def _lesson(self, text: Text, frequencies: Tensor) -> Lesson:
        hidden = self._reader.last(text.token_ids[:-1], text.num_answer_tokens)[text.places]
        totals = []
        for rows in hidden.split(ROWS_AT_ONCE):
            logits = self._head(rows)
            totals.append(logits.logsumexp(-1))
            frequencies += (logits - totals[-1][:, None]).exp_().sum(0)
        return Lesson(text, hidden.to("cpu", self._dtype), torch.cat(totals).cpu())


def fast_reading(target: PreTrainedModel) -> PreTrainedModel:
    """The target, or a float32 copy if the processor has no bfloat16 arithmetic and so is much faster in float32.

    The distribution is the same up to rounding.
    """
    slow = target.device.type == "cpu" and target.dtype == torch.bfloat16 and not native_bfloat16()
    return copy.deepcopy(target).float() if slow else target
