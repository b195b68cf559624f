"""A script under a grammar: what a model would write that wants to say the script and may not say everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from precedent.sampling.probabilities import largest_id
from precedent.sampling.row_shaper import RowShaper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSERS = ('"', "}", "]")
"""What ends JSON soonest, best first."""


def follow(script: Sequence[int], shape: RowShaper, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """The answer of a model that follows `script` as long as `shape` lets it, and then ends as soon as it may."""
    answer: list[int] = []
    end_id = int(tokenizer.eos_token_id)
    while len(answer) < max_tokens and end_id not in answer:
        row = _wishes(tokenizer)
        if answer == list(script[: len(answer)]) and len(answer) < len(script):
            row[script[len(answer)]] = 100.0
        answer.append(largest_id(shape(answer, row)))
    return answer


def _wishes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    row = torch.zeros(len(tokenizer))
    row[int(tokenizer.eos_token_id)] = 10.0
    for rank, closer in enumerate(CLOSERS):
        row[tokenizer.encode(closer, add_special_tokens=False)[0]] = 9.0 - rank
    return row
