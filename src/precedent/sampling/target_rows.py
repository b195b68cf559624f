"""The target model's rows over one scored tree: constrained, normalised once, and believed only when checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.errors import ConfigError, GenerationError
from precedent.sampling.constraints import RowShaper, shaped_rows
from precedent.sampling.coupling import coupled_choice, noise_key
from precedent.sampling.probabilities import largest, probs_of
from precedent.tree import ROOT, CandidateTree

log = logging.getLogger(__name__)


class TargetRows:
    """The target model's rows over one scored tree, shaped and normalised once.

    `logits` is `[num_nodes + 1, vocab_size]`: row 0 follows the committed text, row i + 1 follows node i. `shape`
    applies the request's constraints with the node's own path. On a CPU a row is computed when it is asked for: an
    all-point tree pays only for the rows that a walk visits. On a GPU (`at_once`, decided by the device unless given)
    all rows are one matrix, constrained together, and what a walk needs to know of them is read back together; but
    where a constraint cannot do that `until` then (seconds of `perf_counter`), or fails at a node to which nobody may
    come, rows are computed as on a CPU.
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
        until: float = math.inf,
    ) -> None:
        self._logits, self._tree, self._params = logits, tree, params
        self._output_ids, self._shape = output_ids, shape
        self._may_be_at_once, self._until = logits.is_cuda if at_once is None else at_once, until
        self._probs: dict[int, Tensor] = {}
        self._read: tuple[list[float], list[int]] | None = None

    def compute_together(self) -> bool:
        """Constrain all rows together, unless that was done before; says whether they are."""
        return self._may_be_at_once and self._together is not None

    def logits(self, node: int) -> Tensor:
        """The constrained logits after `node`, `[vocab_size]`. Raises what a constraint raises for that node."""
        if self._shape is None or self.compute_together():
            return self._all_logits[node + 1]
        return self._constrained(self._shape, node)

    def certainty(self) -> Tensor:
        """Logits of token 0 for certain, `[vocab_size]`: a row for a node that was not scored."""
        index = torch.zeros(1, dtype=torch.long, device=self._logits.device)
        return torch.full_like(self._logits[0], -torch.inf).index_fill_(0, index, 0.0)

    def argmax(self, node: int) -> int:
        """The greedy token after `node`, the lowest id on ties. Raises GenerationError on NaN or if all are masked."""
        if self.compute_together():
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
        if self.compute_together():
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
        """Raise GenerationError if the row after `node` holds NaN or infinity, or if all its tokens are masked."""
        self._check(self._largest[0][node + 1], node)

    @cached_property
    def _all_logits(self) -> Tensor:
        if self._shape is None:
            return self._logits
        if self._together is not None:
            return self._together
        return torch.stack([self._constrained(self._shape, node) for node in range(ROOT, len(self._tree))])

    @cached_property
    def _together(self) -> Tensor | None:
        if self._shape is None:
            return self._logits
        paths = [self._text_before(node) for node in range(ROOT, len(self._tree))]
        try:
            return shaped_rows(self._shape, paths, self._logits, self._until)
        except Exception:  # at one node perhaps, which no walk may ever come to: who comes there hears of it
            log.debug("rows could not be constrained together", exc_info=True)
            return None

    def _constrained(self, shape: RowShaper, node: int) -> Tensor:
        return shape(self._text_before(node), self._logits[node + 1])

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
