"""The interface of a constraint: a function of a row of logits and the text before it. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

RowShaper = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""`(output_ids, logits_row [vocab_size]) -> logits_row`: applies constraints, given the text that precedes the row.

It must not write to the given row, which is used again, nor wait for its device: on a GPU all rows of a tree are shaped
while the forward that computes them may still be running.
"""


@runtime_checkable
class ForcesTokens(Protocol):
    """A constraint that can tell cheaply where it allows only one token. Optional for a constraint."""

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow `output_ids`, in order, up to the first place with a choice.

        Each is the only token that the constraint does not mask after those before it. `()` is always correct, just
        slower. Called once per step; the constraint's effect on rows must not depend on it.
        """


def forced_tokens(constraint: RowShaper, output_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a constraint forces after `output_ids`; empty if it cannot tell."""
    return tuple(constraint.forced(output_ids)) if isinstance(constraint, ForcesTokens) else ()
