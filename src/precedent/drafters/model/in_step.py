"""A draft model serves several requests with one forward per token: their drawings go on in step.

A drawing is a generator that yields what it wants scored, a slot and a tree, and is sent the logits after every row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from precedent.runtime.isolate import together
from precedent.target import Slot, TargetModel
from precedent.tree import CandidateTree

Wanted = tuple[Slot, CandidateTree]
Drawing = Generator[Wanted, Tensor, None]
Extending = Generator[Wanted, Tensor, bool]
"""One token more, if one may follow."""


@dataclass(slots=True, eq=False)
class RunningDrawing:
    """One request's drawing: what it wants scored next (None: it has ended), and how it failed.

    `seconds` are those before its first forward, and its share of every round that it took part in, by rows.
    """

    drawing: Drawing | Extending
    wanted: Wanted | None = None
    seconds: float = 0.0
    error: Exception | None = None

    @property
    def rows(self) -> int:
        """How many rows it wants scored."""
        return 0 if self.wanted is None else len(self.wanted[1]) + 1

    def go_on(self, logits: Tensor | None) -> None:
        """Go on with what was scored, None at first."""
        self._advance(lambda: self.drawing.send(logits))  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        """Raise the error in the drawing, where it waits for its logits."""
        self._advance(lambda: self.drawing.throw(error))

    def _advance(self, resume: Callable[[], Wanted]) -> None:
        try:
            self.wanted = resume()
        except StopIteration:
            self.wanted = None
        except Exception as error:
            self.wanted, self.error = None, error


@torch.inference_mode()
def draw_in_step(
    model: TargetModel, drawings: Sequence[Drawing | Extending], at_work: Callable[[], AbstractContextManager[object]]
) -> list[RunningDrawing]:
    """Run all drawings to their ends, in as many forwards as the longest one needs; each fails alone.

    Forwards are made `at_work`.
    """
    running = [RunningDrawing(drawing) for drawing in drawings]
    for each in running:
        started = perf_counter()
        each.go_on(None)
        each.seconds = perf_counter() - started
    while asking := [each for each in running if each.wanted is not None]:
        _round(model, asking, at_work)
    return running


def _round(
    model: TargetModel, asking: Sequence[RunningDrawing], at_work: Callable[[], AbstractContextManager[object]]
) -> None:
    """One forward for all of them, and what each makes of it.

    It is timed as a whole: a GPU has only begun when its forward returns, and the first that reads waits for all.
    """
    started, rows = perf_counter(), [each.rows for each in asking]

    def score(some: Sequence[RunningDrawing]) -> list[Tensor]:
        return model.score([each.wanted for each in some if each.wanted is not None])

    with at_work():
        scored = together(asking, score, lambda each, error: each.fail(error))
    for each, logits in scored:
        each.go_on(logits)
    seconds = perf_counter() - started
    for each, count in zip(asking, rows, strict=True):
        each.seconds += seconds * count / sum(rows)
