"""Constraints on a node's row of logits: penalties, biases and masks, as functions `(output_ids, row) -> row`.

`output_ids` are the tokens after the prompt: the committed answer, then the node's path in the candidate tree. The
target and the draft model apply the same function, so that both distributions cover the same tokens. A row has one
entry per token id of the tokenizer; the extra columns of a wider output head have been cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.config import SamplingParams
from precedent.runtime.placing import placed
from precedent.sampling.row_shaper import RowShaper, forced_tokens


def repetition_penalty(prompt_ids: Sequence[int], penalty: float) -> RowShaper:
    """Divide positive and multiply negative logits of tokens in prompt and answer (Keskar et al. 1909.05858, 4.1)."""
    in_prompt = np.unique(np.array(prompt_ids, dtype=np.int64))

    def shape(output_ids: Sequence[int], row: Tensor) -> Tensor:
        known = np.concatenate([in_prompt, np.array(output_ids, dtype=np.int64)])
        seen, row = _indices(known[known < row.numel()], row), _wide(row)
        values = row[seen]
        row[seen] = torch.where(values < 0, values * penalty, values / penalty)
        return row

    return shape


def logit_bias(biases: Mapping[int, float]) -> RowShaper:
    """Add a number to the logits of some tokens: OpenAI's `logit_bias`."""
    token_ids, added = np.array(list(biases), dtype=np.int64), np.array(list(biases.values()))

    def shape(output_ids: Sequence[int], row: Tensor) -> Tensor:
        row, ids = _wide(row), _indices(token_ids, row)
        return row.index_copy_(0, ids, row[ids] + _values(added, row))

    return shape


def occurrence_penalty(frequency: float, presence: float) -> RowShaper:
    """Lower the logits of tokens that occur in the answer: OpenAI's `frequency_penalty` and `presence_penalty`.

    A token that occurs n times loses n times `frequency`, and `presence` once. The prompt does not count.
    """

    def shape(output_ids: Sequence[int], row: Tensor) -> Tensor:
        counts = {token: count for token, count in Counter(output_ids).items() if token < row.numel()}
        row, ids = _wide(row), _indices(list(counts), row)
        lost = [count * frequency + presence for count in counts.values()]
        return row.index_copy_(0, ids, row[ids] - _values(lost, row))

    return shape


def _indices(ids: Sequence[int] | NDArray[np.int64], row: Tensor) -> Tensor:
    return placed(np.array(ids, dtype=np.int64), row.device)


def _values(values: Sequence[float] | NDArray[np.float64], row: Tensor) -> Tensor:
    """The values as a tensor on the row's device: float64 for a float64 row, else float32."""
    return placed(np.array(values, dtype=np.float64 if row.dtype == torch.float64 else np.float32), row.device)


def _wide(row: Tensor) -> Tensor:
    """A copy of the row in at least float32, the precision in which transformers applies penalties."""
    return row.to(torch.float64 if row.dtype == torch.float64 else torch.float32, copy=True)


class Chain:
    """Applies several constraints in order."""

    def __init__(self, constraints: Sequence[RowShaper]) -> None:
        self._constraints = tuple(constraints)

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Apply all constraints in order."""
        for constraint in self._constraints:
            row = constraint(output_ids, row)
        return row

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The longest answer of any constraint: tokens forced by one are forced for all."""
        return max((forced_tokens(constraint, output_ids) for constraint in self._constraints), key=len, default=())


def constraints_for(
    params: SamplingParams, prompt_ids: Sequence[int], grammar: RowShaper | None = None
) -> RowShaper | None:
    """The constraints from `params` and the request's grammar, or None if rows stay unchanged.

    Biases and penalties apply in the order of transformers and vLLM: bias, repetition, frequency and presence.
    """
    wanted: list[RowShaper] = []
    if grammar is not None:
        wanted.append(grammar)
    if params.logit_bias:
        wanted.append(logit_bias(params.logit_bias))
    if params.repetition_penalty != 1.0:
        wanted.append(repetition_penalty(prompt_ids, params.repetition_penalty))
    if params.frequency_penalty or params.presence_penalty:
        wanted.append(occurrence_penalty(params.frequency_penalty, params.presence_penalty))
    return Chain(wanted) if wanted else None
