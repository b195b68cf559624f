"""The interface of a constraint: a function of a row of logits and the text before it. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

RowShaper = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""`(output_ids, logits_row [vocab_size]) -> logits_row`: applies constraints, given the text that precedes the row.

It must not write to the given row, which is used again.
"""


@runtime_checkable
class ForcesTokens(Protocol):
    """A constraint that can tell cheaply where it allows only one token. Optional for a constraint."""

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow `output_ids`, in order, up to the first place with a choice.

        Each is the only token that the constraint does not mask after those before it. `()` is always correct, just
        slower. Called once per step; the constraint's effect on rows must not depend on it.
        """


@runtime_checkable
class ShapesTogether(Protocol):
    """A constraint that shapes many rows in a few operations. Optional for a constraint.

    On a GPU all rows of a tree are shaped while the forward that computes them may still be running, so anything that
    waits for the device waits for the whole forward.
    """

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor | None:
        """Shape every row of `rows` `[len(paths), vocab_size]` as calling the constraint with that row's path does.

        The numbers must be the same. Must not write to `rows` or read anything back from its device. Returns None if
        the host cannot finish by `until` (seconds of `perf_counter`); the constraint is then called for each row that
        the walk visits.
        """


def shaped_rows(constraint: RowShaper, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor | None:
    """Shape all rows at once, each with its own path; None if the constraint can only shape them one by one."""
    return constraint.shape_all(paths, rows, until) if isinstance(constraint, ShapesTogether) else None


def forced_tokens(constraint: RowShaper, output_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a constraint forces after `output_ids`; empty if it cannot tell."""
    return tuple(constraint.forced(output_ids)) if isinstance(constraint, ForcesTokens) else ()
