"""Runs the drawings of several requests in step, so that a draft model needs one forward per token for all of them.

A drawing is a generator. It yields what it wants scored, a slot and a tree, and receives the logits of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from precedent.runtime.failures import together
from precedent.target import Slot, TargetModel
from precedent.tree import CandidateTree

Wanted = tuple[Slot, CandidateTree]
Drawing = Generator[Wanted, Tensor, None]
Extending = Generator[Wanted, Tensor, bool]
"""Draws one more token; returns False if none may follow."""


@dataclass(slots=True, eq=False)
class RunningDrawing:
    """One request's drawing: what it wants scored next (None: it has ended), and its error if it failed.

    `seconds` is the time before its first forward, plus its share, by rows, of every round that it took part in.
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
        """Continue the drawing with the logits that it asked for; None starts it."""
        self._advance(lambda: self.drawing.send(logits))  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        """Raise the error inside the drawing, where it waits for its logits."""
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
    """Run all drawings to the end, in as many forwards as the longest one needs; each fails alone.

    `at_work` is the context for forwards.
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
    """Run one forward for all drawings, and continue each with its logits.

    The round is timed as a whole: a GPU has only started when its forward returns, and the first read waits for all.
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
