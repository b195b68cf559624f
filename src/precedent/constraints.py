"""What happens to a row of logits at a node: `(output_ids, row) -> row`, with that node's own path.

`output_ids` are the tokens after the prompt: the committed answer and then the node's path in the candidate tree. The
same function is applied to target and draft model alike, so that both laws speak of the same thing. A row has an entry
for every id of the tokenizer; what a wider output head says of others is cut off before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.sampling import RowShaper


@runtime_checkable
class ForcesTokens(Protocol):
    """A constraint that knows cheaply where it leaves one token only; an optional part of every constraint."""

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow `output_ids` one after the other, up to the first place with a choice.

        Each is the one token that the constraint does not mask behind those before it. `()` is always a right answer,
        a slow one. Called once per step; what the constraint does to rows must not depend on it.
        """


class RepetitionPenalty:
    """Makes tokens that occurred in the prompt or the answer less likely (Keskar et al. 1909.05858, section 4.1)."""

    def __init__(self, prompt_ids: Sequence[int], penalty: float) -> None:
        self._prompt_ids, self._penalty = frozenset(prompt_ids), penalty

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Divide positive and multiply negative logits of seen tokens by the penalty."""
        known = sorted(token for token in self._prompt_ids.union(output_ids) if token < row.numel())
        seen = torch.tensor(known, dtype=torch.long, device=row.device)
        row = row.to(torch.float64 if row.dtype == torch.float64 else torch.float32, copy=True)
        values = row[seen]
        row[seen] = torch.where(values < 0, values * self._penalty, values / self._penalty)
        return row


class Chain:
    """Applies several constraints one after the other."""

    def __init__(self, constraints: Sequence[RowShaper]) -> None:
        self._constraints = tuple(constraints)

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Apply all constraints in order."""
        for constraint in self._constraints:
            row = constraint(output_ids, row)
        return row

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """What one of them forces, all must allow: the longest of their answers."""
        return max((forced_tokens(constraint, output_ids) for constraint in self._constraints), key=len, default=())


def forced_tokens(constraint: RowShaper, output_ids: Sequence[int]) -> tuple[int, ...]:
    """What must follow by a constraint; nothing where it cannot tell."""
    return tuple(constraint.forced(output_ids)) if isinstance(constraint, ForcesTokens) else ()


def constraints_for(
    params: SamplingParams, prompt_ids: Sequence[int], grammar: RowShaper | None = None
) -> RowShaper | None:
    """The constraints that `params` asks for and the request's grammar, or None when rows stay as they are."""
    wanted: list[RowShaper] = []
    if params.repetition_penalty != 1.0:
        wanted.append(RepetitionPenalty(prompt_ids, params.repetition_penalty))
    if grammar is not None:
        wanted.append(grammar)
    return Chain(wanted) if wanted else None
