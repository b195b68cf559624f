"""The interface of a constraint: a function of a row of logits and the text before it. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RowShaper = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""`(output_ids, logits_row [vocab_size]) -> logits_row`: applies constraints, given the text that precedes the row.

It must not write to the given row, which is used again, nor wait for its device: on a GPU all rows of a tree are shaped
while the forward that computes them may still be running.
"""


def forced_tokens(constraint: RowShaper, output_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that must follow `output_ids`, in order, up to the first place with a choice.

    Asks the constraint's method `forced(output_ids)`, once per step; empty if it has none. Each token is the only one
    that the constraint does not mask after those before it; an empty answer is always correct, just slower.
    """
    forced = getattr(constraint, "forced", None)
    return () if forced is None else tuple(forced(output_ids))
