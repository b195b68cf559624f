"""The target model's rows over one scored tree: constrained, checked and normalised on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.errors import ConfigError, GenerationError, GrammarError, UnsupportedError
from precedent.sampling.coupling import coupled_choice
from precedent.sampling.probabilities import largest, probs_of
from precedent.sampling.row_shaper import RowShaper
from precedent.tree import CandidateTree


class TargetRows:
    """The target model's rows over one scored tree; each is constrained and normalised on first use.

    `raw` are the logits `[num_nodes + 1, vocab_size]`: row 0 follows the committed text, row i + 1 follows node i.
    `shape` applies the request's constraints, given the node's path. A tree of fixed candidates pays only for the rows
    that the walk visits. `hidden` returns a node's hidden state, where the target keeps them.
    """

    def __init__(
        self,
        raw: Tensor,
        tree: CandidateTree,
        params: SamplingParams,
        output_ids: Sequence[int] = (),
        shape: RowShaper | None = None,
        hidden: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.raw, self.tree, self.params, self.output_ids, self.shape = raw, tree, params, output_ids, shape
        self._hidden = hidden
        self._probs: dict[int, Tensor] = {}

    def logits(self, node: int) -> Tensor:
        """The constrained logits after `node`, `[vocab_size]`. Raises whatever a constraint raises at that node."""
        row = self.raw[node + 1]
        return row if self.shape is None else self.shape(self.text_before(node), row)

    def probs(self, node: int) -> Tensor:
        """Probabilities after `node` (`ROOT` for the row after the committed text), `[vocab_size]`.

        Raises GenerationError if the row holds NaN or infinity, or if all its tokens are masked.
        """
        if node not in self._probs:
            row = self.logits(node)
            self.check(float(row.max()), node)
            self._probs[node] = probs_of(row, self.params)
        return self._probs[node]

    def hidden(self, node: int) -> Tensor:
        """The target's hidden state of a `node`, `[hidden_size]`. Raises UnsupportedError if none are kept."""
        if self._hidden is None:
            raise UnsupportedError("this target keeps no hidden states: name the mode in the engine's own speculation")
        return self._hidden(node)

    def argmax(self, node: int) -> int:
        """The greedy token after `node`, the lowest id on ties. Raises GenerationError as `probs` does."""
        value, token = largest(self.logits(node))
        self.check(value, node)
        return token

    def coupled(self, node: int) -> int:
        """The token that the seed's noise chooses after `node`. Raises GenerationError as `probs` does."""
        if self.params.seed is None:
            raise ConfigError("mode='coupled' needs a seed: give SamplingParams(seed=...)")
        return coupled_choice(self.probs(node), self.params.seed, self._position(node))

    def text_before(self, node: int) -> tuple[int, ...]:
        """The tokens of the answer before the row after `node`."""
        return (*self.output_ids, *self.tree.tokens_to(node))

    def check(self, largest: float, node: int) -> None:
        """Raise GenerationError if the row after `node`, whose largest logit is given, cannot be sampled from."""
        position = self._position(node)
        if largest != largest or largest == torch.inf:
            raise GenerationError(f"the model's logits at output position {position} hold NaN or infinity")
        if largest == -torch.inf:
            raise GrammarError(f"every token is masked at output position {position}: the constraints exclude all")

    def _position(self, node: int) -> int:
        return len(self.output_ids) + len(self.tree.path_to(node))
