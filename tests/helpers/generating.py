"""Tiny models that generate, alone and with `custom_generate=precedent.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import precedent
from precedent.planning.costs import CostCurve
from precedent_generate.prepared import prepared_for
from precedent_testing.drafters import OracleDrafter, RandomDrafter
from precedent_testing.tiny_models import tiny_causal_lm

VOCABULARY = 64
PROMPT = [7, 8, 9, 10, 7, 8, 9, 11, 7, 8]
NEW = 24


def made(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    """A tiny float64 model that speculates as much as it can."""
    model = tiny_causal_lm(model_type, **{"vocab_size": VOCABULARY, "num_hidden_layers": 2, "seed": 5, **settings})
    prepared_for(model).planner.cost = CostCurve()
    return model


def prompts(*rows: Sequence[int], pad: int = 0) -> dict[str, Tensor]:
    """Input ids and attention mask, padded on the left."""
    longest = max(map(len, rows))
    padded = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def both(
    model: PreTrainedModel, inputs: dict[str, Tensor], drafters: Sequence[Any] | None = None, **settings: Any
) -> tuple[Any, Any]:
    """What generate gives alone, and with our loop behind it: by default with every answer's oracle as drafter."""
    alone = model.generate(**inputs, **settings)
    if drafters is None:
        sequences = alone if isinstance(alone, Tensor) else alone.sequences
        answer = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        drafters = [OracleDrafter([*answer[:6], 3, *answer[7:]]), RandomDrafter(VOCABULARY, seed=1), "prompt"]
    ours = model.generate(**inputs, **settings, custom_generate=precedent.generate, drafters=drafters)
    return alone, ours


class BanLast(LogitsProcessor):
    """A user's own processor: never the same token twice in a row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class SumStop(StoppingCriteria):
    """A user's own criterion: stops when the ids of the answer add up to more than enough."""

    def __init__(self, start: int, enough: int) -> None:
        self.start, self.enough = start, enough

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, self.start :].sum(1) > self.enough


class Listener(BaseStreamer):
    """A streamer that notes everything, and breaks on demand."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.heard: list[Any] = []
        self.fails_after = fails_after

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())
        if len(self.heard) > self.fails_after:
            raise OSError("nobody listens")

    def end(self) -> None:
        self.heard.append("end")
