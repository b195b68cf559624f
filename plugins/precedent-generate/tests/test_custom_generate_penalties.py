"""Penalties of OpenAI's in `custom_generate`: those of a processor of one's own, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generating import NEW, PROMPT, VOCABULARY, prompts
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import precedent
from precedent.errors import ConfigError
from precedent_testing.drafters import RandomDrafter


class OpenAIs(LogitsProcessor):
    """OpenAI's penalties and biases, token by token, for who has no other way: `generate` does not know them."""

    def __init__(self, frequency_penalty: float = 0.0, presence_penalty: float = 0.0, logit_bias: Any = None) -> None:
        self.frequency, self.presence, self.bias = frequency_penalty, presence_penalty, logit_bias or {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, len(PROMPT) :].tolist()):
            for token in range(scores.shape[1]):
                lost = ids.count(token) * self.frequency + (token in ids) * self.presence
                scores[row, token] += self.bias.get(token, 0.0) - lost
        return scores


@pytest.mark.parametrize(
    "penalties",
    [
        {"frequency_penalty": 0.6},
        {"presence_penalty": 1.2},
        {"logit_bias": {30: 6.0, 31: -2.0}},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {30: 3.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampled", [False, True])
def test_openais_penalties_are_those_of_a_processor_of_ones_own(
    model: PreTrainedModel, penalties: dict[str, Any], sampled: bool
) -> None:
    """Also for several rows, beside the repetition penalty, and before temperature and truncation."""
    inputs = prompts(PROMPT, [9, 8, 7, 6, *PROMPT[4:]])
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": sampled, "repetition_penalty": 1.1}
    settings |= {"temperature": 0.7, "top_k": 9} if sampled else {}
    ours_alone = {"custom_generate": precedent.generate, "drafters": ["prompt", RandomDrafter(VOCABULARY, seed=1)]}

    def text(**how: Any) -> list[list[int]]:
        torch.manual_seed(5)
        return model.generate(**inputs, **settings, **how).tolist()

    expected = text(logits_processor=LogitsProcessorList([OpenAIs(**penalties)]), **(ours_alone if sampled else {}))
    assert text(**ours_alone, **penalties) == expected != text(**ours_alone)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"frequency_penalty": 3}, "frequency_penalty=3 must be a number between -2 and 2"),
        ({"logit_bias": {VOCABULARY: 1}}, f"logit_bias names token id {VOCABULARY}"),
    ],
)
def test_wrong_penalties_are_refused(model: PreTrainedModel, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model.generate(**prompts(PROMPT), custom_generate=precedent.generate, max_new_tokens=NEW, **wrong)
