"""Constraints on a node's row of logits: penalties, biases and masks, as functions `(output_ids, row) -> row`.

`output_ids` are the tokens after the prompt: the committed answer, then the node's path in the candidate tree. The
target and the draft model apply the same function, so that both distributions cover the same tokens. A row has one
entry per token id of the tokenizer; the extra columns of a wider output head have been cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from os.path import commonprefix

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.config import SamplingParams
from precedent.runtime.placing import placed
from precedent.sampling.row_shaper import RowShaper, forced_tokens, shaped_rows


class RepetitionPenalty:
    """Makes tokens that occur in the prompt or the answer less likely (Keskar et al. 1909.05858, section 4.1)."""

    def __init__(self, prompt_ids: Sequence[int], penalty: float) -> None:
        self._prompt_ids, self._penalty = np.unique(np.array(prompt_ids, dtype=np.int64)), penalty

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Divide positive and multiply negative logits of seen tokens by the penalty."""
        seen = _indices(self._known(output_ids, row.numel()), row)
        row = _wide(row, copy=True)
        row[seen] = self._penalised(row[seen])
        return row

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor:
        """Penalise all rows at once, without waiting for the device."""
        shared, size = commonprefix(paths), rows.shape[-1]  # noqa: RUF071 (of token ids, not of names of files)
        places = [row * size + token for row, path in enumerate(paths) for token in path[len(shared) :] if token < size]
        seen = torch.zeros_like(rows, dtype=torch.bool)
        seen.index_fill_(1, _indices(self._known(shared, size), rows), True)
        seen.view(-1).index_fill_(0, _indices(places, rows), True)
        rows = _wide(rows)
        return torch.where(seen, self._penalised(rows), rows)

    def _known(self, output_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
        """The tokens of the prompt and the answer; some of them twice."""
        known = np.concatenate([self._prompt_ids, np.array(output_ids, dtype=np.int64)])
        return known[known < vocab_size]

    def _penalised(self, values: Tensor) -> Tensor:
        return torch.where(values < 0, values * self._penalty, values / self._penalty)


class LogitBias:
    """Adds a number to the logits of some tokens: OpenAI's `logit_bias`."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids, self._biases = np.array(list(biases), dtype=np.int64), np.array(list(biases.values()))

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Add each bias to its token's logit."""
        return self._biased(row)

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor:
        """Add the biases to all rows at once."""
        return self._biased(rows)

    def _biased(self, rows: Tensor) -> Tensor:
        rows, ids = _wide(rows, copy=True), _indices(self._ids, rows)
        return rows.index_copy_(-1, ids, rows.index_select(-1, ids) + _values(self._biases, rows))


class OccurrencePenalty:
    """Lowers the logits of tokens that occur in the answer: OpenAI's `frequency_penalty` and `presence_penalty`.

    A token that occurs n times loses n times `frequency`, and `presence` once. The prompt does not count.
    """

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Subtract from the logits of the tokens in `output_ids`."""
        row, counts = _wide(row, copy=True), Counter(output_ids)
        ids = [token for token in counts if token < row.numel()]
        places = _indices(ids, row)
        return row.index_copy_(0, places, row[places] - _values(self._penalties(counts, ids), row))

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor:
        """Penalise all rows at once: count the prefix that all paths share, then the rest of each path."""
        shared, rows = commonprefix(paths), _wide(rows)  # noqa: RUF071 (of token ids, not of names of files)
        size, counts = rows.shape[-1], Counter(shared)
        ids = [token for token in counts if token < size]
        lost = torch.zeros_like(rows)
        lost.index_copy_(1, _indices(ids, rows), _values(self._penalties(counts, ids), rows).expand(len(rows), -1))
        places, values = self._behind(shared, counts, paths, size)
        lost.view(-1).index_copy_(0, _indices(places, rows), _values(values, rows))
        return rows - lost

    def _behind(
        self, shared: Sequence[int], counts: Counter[int], paths: Sequence[tuple[int, ...]], size: int
    ) -> tuple[list[int], list[float]]:
        """Penalties of the tokens behind the shared prefix, and their places in the flattened rows."""
        places, values = list[int](), list[float]()
        for number, path in enumerate(paths):
            own = Counter(path[len(shared) :])
            ids = [token for token in own if token < size]
            places += [number * size + token for token in ids]
            values += [self._penalty(counts[token] + own[token]) for token in ids]
        return places, values

    def _penalties(self, counts: Counter[int], ids: Sequence[int]) -> list[float]:
        return [self._penalty(counts[token]) for token in ids]

    def _penalty(self, count: int) -> float:
        return count * self._frequency + self._presence


def _indices(ids: Sequence[int] | NDArray[np.int64], rows: Tensor) -> Tensor:
    return placed(np.array(ids, dtype=np.int64), rows.device)


def _values(values: Sequence[float] | NDArray[np.float64], rows: Tensor) -> Tensor:
    """The values as a tensor on the rows' device: float64 for float64 rows, else float32."""
    return placed(np.array(values, dtype=np.float64 if rows.dtype == torch.float64 else np.float32), rows.device)


def _wide(rows: Tensor, *, copy: bool = False) -> Tensor:
    """The rows in at least float32, the precision in which transformers applies penalties."""
    return rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32, copy=copy)


class Chain:
    """Applies several constraints in order."""

    def __init__(self, constraints: Sequence[RowShaper]) -> None:
        self._constraints = tuple(constraints)

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Apply all constraints in order."""
        for constraint in self._constraints:
            row = constraint(output_ids, row)
        return row

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor | None:
        """Apply all constraints to all rows in order."""
        shaped: Tensor | None = rows
        for constraint in self._constraints:
            shaped = None if shaped is None else shaped_rows(constraint, paths, shaped, until)
        return shaped

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The longest answer of any constraint: tokens forced by one are forced for all."""
        return max((forced_tokens(constraint, output_ids) for constraint in self._constraints), key=len, default=())


def constraints_for(
    params: SamplingParams, prompt_ids: Sequence[int], grammar: RowShaper | None = None
) -> RowShaper | None:
    """The constraints from `params` and the request's grammar, or None if rows stay unchanged.

    Biases and penalties apply in the order of transformers and vLLM: bias, repetition, frequency and presence.
    """
    wanted: list[RowShaper] = []  # the grammar first: its `shape_all` may give up, and nothing is computed in vain
    if grammar is not None:
        wanted.append(grammar)
    if params.logit_bias:
        wanted.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1.0:
        wanted.append(RepetitionPenalty(prompt_ids, params.repetition_penalty))
    if params.frequency_penalty or params.presence_penalty:
        wanted.append(OccurrencePenalty(params.frequency_penalty, params.presence_penalty))
    return Chain(wanted) if wanted else None
