"""The target model's rows over one scored tree: constrained, normalised once, and believed only when checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.constraints import RowShaper, shaped_rows
from precedent.coupling import coupled_choice, noise_key
from precedent.errors import ConfigError, GenerationError
from precedent.sampling import largest, probs_of
from precedent.tree import ROOT, CandidateTree


class TargetRows:
    """The target model's rows over one scored tree, shaped and normalised once.

    `logits` is `[num_nodes + 1, vocab_size]`: row 0 follows the committed text, row i + 1 follows node i. `shape`
    applies the request's constraints with the node's own path. On a CPU a row is computed when it is asked for: an
    all-point tree pays only for the rows that a walk visits. On a GPU (`at_once`, decided by the device unless given)
    all rows are one matrix, constrained together, and what a walk needs to know of them is read back together. A
    constraint that fails at a node fails who asks for that node's row, and nobody else.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: CandidateTree,
        params: SamplingParams,
        output_ids: Sequence[int] = (),
        shape: RowShaper | None = None,
        *,
        at_once: bool | None = None,
    ) -> None:
        self._logits, self._tree, self._params = logits, tree, params
        self._output_ids, self._shape = output_ids, shape
        self._may_be_at_once = logits.is_cuda if at_once is None else at_once
        self._probs: dict[int, Tensor] = {}
        self._failures: dict[int, Exception] = {}
        self._read: tuple[list[float], list[int]] | None = None

    @cached_property
    def at_once(self) -> bool:
        """Whether all rows are computed together; asked for beside the forward, this constrains them meanwhile."""
        return self._may_be_at_once and self._shaped_together is not None

    def logits(self, node: int) -> Tensor:
        """The constrained logits after `node`, `[vocab_size]`."""
        row = self._logits[node + 1]
        return row if self._shape is None else self._shape(self._text_before(node), row)

    def argmax(self, node: int) -> int:
        """The greedy token after `node`, the lowest id on ties. Raises GenerationError on NaN or if all are masked."""
        if self.at_once:
            self.check(node)
            return self._largest[1][node + 1]
        value, token = largest(self.logits(node))
        self._check(value, node)
        return token

    def coupled(self, node: int) -> int:
        """The token that the seed's noise chooses after `node`. Raises GenerationError as `__call__` does."""
        return coupled_choice(self(node), self._seed, self._position(node))

    def noise_keys(self) -> list[int]:
        """The key of the seed's noise after the root and after every node. Raises ConfigError without a seed."""
        depths = [0, *self._tree.depths.tolist()]
        keys = [noise_key(self._seed, len(self._output_ids) + depth) for depth in range(max(depths) + 1)]
        return [keys[depth] for depth in depths]

    @property
    def _seed(self) -> int:
        if self._params.seed is None:
            raise ConfigError("mode='coupled' needs a seed: give SamplingParams(seed=...)")
        return self._params.seed

    def __call__(self, node: int) -> Tensor:
        """Probabilities after `node` (`ROOT` for the row after the committed text), `[vocab_size]`.

        Raises GenerationError on NaN or if all are masked.
        """
        if self.at_once:
            self.check(node)
            return self.matrix()[node + 1]
        if node not in self._probs:
            row = self.logits(node)
            self._check(float(row.max()), node)
            self._probs[node] = probs_of(row, self._params)
        return self._probs[node]

    @property
    def law(self) -> tuple[float, int, float, float]:
        """What makes a law of a row: rows of two sequences with the same can be computed together."""
        params = self._params
        return params.temperature, params.top_k, params.top_p, params.min_p

    def law_of(self, logits: Tensor) -> Tensor:
        """Probabilities of any logits `[..., vocab_size]`, made as these rows' are."""
        return probs_of(logits, self._params)

    @property
    def vocab_size(self) -> int:
        """Numbers in a row."""
        return self._logits.shape[-1]

    def logits_of_all(self) -> Tensor:
        """The constrained logits, `[num_nodes + 1, vocab_size]`."""
        return self._all_logits

    def matrix(self) -> Tensor:
        """All probabilities, `[num_nodes + 1, vocab_size]`; nothing is read back from the device.

        A row that cannot be sampled holds whatever comes out: `check` a node before its row is believed.
        """
        return self._all_probs

    def check(self, node: int) -> None:
        """Raise GenerationError if the row after `node` holds NaN or infinity, or if all its tokens are masked.

        What a constraint raised for that row is raised here as well.
        """
        value = self._largest[0][node + 1]
        if node in self._failures:
            raise self._failures[node]
        self._check(value, node)

    @cached_property
    def _all_logits(self) -> Tensor:
        return self._one_by_one() if self._shaped_together is None else self._shaped_together

    @cached_property
    def _shaped_together(self) -> Tensor | None:
        if self._shape is None:
            return self._logits
        nodes = range(ROOT, len(self._tree))
        try:
            return shaped_rows(self._shape, [self._text_before(node) for node in nodes], self._logits)
        except Exception:  # at one node perhaps, which no walk may ever come to
            return self._one_by_one()

    def _one_by_one(self) -> Tensor:
        return torch.stack([self._logits_or_failure(node) for node in range(ROOT, len(self._tree))])

    def _logits_or_failure(self, node: int) -> Tensor:
        try:
            return self.logits(node)
        except Exception as error:
            self._failures[node] = error.with_traceback(None)
            return self._logits[node + 1]

    def _text_before(self, node: int) -> tuple[int, ...]:
        return (*self._output_ids, *self._tree.tokens_to(node))

    @cached_property
    def _all_probs(self) -> Tensor:
        return probs_of(self._all_logits, self._params)

    def unread(self) -> Tensor:
        """The largest logit of every row (NaN if one is), then the lowest ids that have them, `[2 * rows]`, unread."""
        values, tokens = self._all_logits.max(-1)
        return torch.cat([values.double(), tokens.double()])

    def take(self, numbers: Sequence[float]) -> None:
        """What `unread` gave, on the host: nothing more is read for `check` and `argmax`."""
        half = len(numbers) // 2
        self._read = list(numbers[:half]), [int(token) for token in numbers[half:]]

    @property
    def _largest(self) -> tuple[list[float], list[int]]:
        """Of every row the largest logit and its id; read now, unless that was done before."""
        if self._read is None:
            self.take(self.unread().tolist())
        assert self._read is not None
        return self._read

    def _check(self, largest: float, node: int) -> None:
        position = self._position(node)
        if largest != largest or largest == torch.inf:
            raise GenerationError(f"the model's logits at output position {position} hold NaN or infinity")
        if largest == -torch.inf:
            raise GenerationError(f"every token is masked at output position {position}: the constraints exclude all")

    def _position(self, node: int) -> int:
        return len(self._output_ids) + len(self._tree.path_to(node))
