"""The target model's rows over one scored tree: constrained, checked and normalised on demand."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.errors import ConfigError, GenerationError, GrammarError, UnsupportedError
from precedent.sampling.coupling import coupled_choice, noise_key
from precedent.sampling.probabilities import largest, probs_of
from precedent.sampling.row_shaper import RowShaper, shaped_rows
from precedent.tree import ROOT, CandidateTree

log = logging.getLogger(__name__)


class TargetRows:
    """The target model's rows over one scored tree; each is constrained and normalised on first use.

    `logits` is `[num_nodes + 1, vocab_size]`: row 0 follows the committed text, row i + 1 follows node i. `shape`
    applies the request's constraints, given the node's path. A tree of fixed candidates pays only for the rows that the
    walk visits. `hidden` returns a node's hidden state, where the target keeps them.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: CandidateTree,
        params: SamplingParams,
        output_ids: Sequence[int] = (),
        shape: RowShaper | None = None,
        hidden: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._logits, self.tree, self._params = logits, tree, params
        self._output_ids, self._shape, self._hidden = output_ids, shape, hidden
        self._probs: dict[int, Tensor] = {}
        self._largest: list[tuple[float, int]] | None = None

    def __len__(self) -> int:
        return len(self._logits)

    def logits(self, node: int) -> Tensor:
        """The constrained logits after `node`, `[vocab_size]`. Raises whatever a constraint raises at that node."""
        row = self._logits[node + 1]
        return row if self._shape is None else self._shape(self._text_before(node), row)

    def probs(self, node: int) -> Tensor:
        """Probabilities after `node` (`ROOT` for the row after the committed text), `[vocab_size]`.

        Raises GenerationError if the row holds NaN or infinity, or if all its tokens are masked.
        """
        if node not in self._probs:
            row = self.logits(node)
            self._check(float(row.max()), node)
            self._probs[node] = probs_of(row, self._params)
        return self._probs[node]

    def hidden(self, node: int) -> Tensor:
        """The target's hidden state of a `node`, `[hidden_size]`. Raises UnsupportedError if none are kept."""
        if self._hidden is None:
            raise UnsupportedError("this target keeps no hidden states: name the mode in the engine's own speculation")
        return self._hidden(node)

    def argmax(self, node: int) -> int:
        """The greedy token after `node`, the lowest id on ties. Raises GenerationError as `probs` does."""
        value, token = self._largest_after(node)
        self._check(value, node)
        return token

    def coupled(self, node: int) -> int:
        """The token that the seed's noise chooses after `node`. Raises GenerationError as `probs` does."""
        return coupled_choice(self.probs(node), self._seed, self._position(node))

    def check(self, node: int) -> None:
        """Raise GenerationError if the row after `node` cannot be sampled from."""
        self._check(self._largest_after(node)[0], node)

    def noise_keys(self) -> list[int]:
        """The noise keys for the root and every node, in row order. Raises ConfigError without a seed."""
        depths = [0, *self.tree.depths.tolist()]
        keys = [noise_key(self._seed, len(self._output_ids) + depth) for depth in range(max(depths) + 1)]
        return [keys[depth] for depth in depths]

    def constrained(self, until: float = math.inf) -> TargetRows | None:
        """These rows with the constraints applied to all at once, on their device and without waiting for it.

        None if a constraint cannot do that by `until` (seconds of `perf_counter`), or if it fails: the failing node may
        be one that the walk never reaches.
        """
        if self._shape is None:
            return self
        texts = [self._text_before(node) for node in range(ROOT, len(self) - 1)]
        try:
            logits = shaped_rows(self._shape, texts, self._logits, until)
        except Exception:
            log.debug("cannot constrain all rows at once, constraining them one by one", exc_info=True)
            return None
        return (
            None
            if logits is None
            else TargetRows(logits, self.tree, self._params, self._output_ids, None, self._hidden)
        )

    def all_logits(self) -> Tensor:
        """The logits of all rows, `[num_nodes + 1, vocab_size]`; only for rows that have been constrained."""
        assert self._shape is None
        return self._logits

    @property
    def warping(self) -> Hashable:
        """The settings that turn logits into probabilities; sequences with equal ones can be batched."""
        params = self._params
        return params.temperature, params.top_k, params.top_p, params.min_p

    def probs_of(self, logits: Tensor) -> Tensor:
        """Probabilities of any logits `[..., vocab_size]` under the same sampling settings."""
        return probs_of(logits, self._params)

    def take_largest(self, largest: list[tuple[float, int]]) -> None:
        """Store the largest logit of every row and its id, read from the device together with other numbers."""
        self._largest = largest

    def _largest_after(self, node: int) -> tuple[float, int]:
        return largest(self.logits(node)) if self._largest is None else self._largest[node + 1]

    @property
    def _seed(self) -> int:
        if self._params.seed is None:
            raise ConfigError("mode='coupled' needs a seed: give SamplingParams(seed=...)")
        return self._params.seed

    def _text_before(self, node: int) -> tuple[int, ...]:
        return (*self._output_ids, *self.tree.tokens_to(node))

    def _check(self, largest: float, node: int) -> None:
        position = self._position(node)
        if largest != largest or largest == torch.inf:
            raise GenerationError(f"the model's logits at output position {position} hold NaN or infinity")
        if largest == -torch.inf:
            raise GrammarError(f"every token is masked at output position {position}: the constraints exclude all")

    def _position(self, node: int) -> int:
        return len(self._output_ids) + len(self.tree.path_to(node))
