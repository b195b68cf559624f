"""What a constraint is to whoever applies it: a function of a row and of the text before it. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

RowShaper = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""`(output_ids, logits_row [vocab_size]) -> logits_row`: constraints applied for the text that precedes the row.

The row given is not written to: it is asked for again.
"""


@runtime_checkable
class ForcesTokens(Protocol):
    """A constraint that knows cheaply where it leaves one token only; an optional part of every constraint."""

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must follow `output_ids` one after the other, up to the first place with a choice.

        Each is the one token that the constraint does not mask behind those before it. `()` is always a right answer,
        a slow one. Called once per step; what the constraint does to rows must not depend on it.
        """


@runtime_checkable
class ShapesTogether(Protocol):
    """A constraint that shapes many rows in a few operations; an optional part of every constraint.

    On a GPU all rows of a tree are shaped, while the forward that computes them may still be running: what waits for
    the device waits for all of it.
    """

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor | None:
        """What calling the constraint with each of the paths makes of its row: `rows` is `[len(paths), vocab_size]`.

        The very same numbers; `rows` is not written to, and nothing is read back from its device. None where the host
        is not done by `until` (seconds of `perf_counter`): then it is asked for the rows to which the walk comes.
        """


def shaped_rows(constraint: RowShaper, paths: Sequence[tuple[int, ...]], rows: Tensor, until: float) -> Tensor | None:
    """What a constraint makes of rows, each behind its own path; None where it shapes them one by one."""
    return constraint.shape_all(paths, rows, until) if isinstance(constraint, ShapesTogether) else None


def forced_tokens(constraint: RowShaper, output_ids: Sequence[int]) -> tuple[int, ...]:
    """What must follow by a constraint; nothing where it cannot tell."""
    return tuple(constraint.forced(output_ids)) if isinstance(constraint, ForcesTokens) else ()
