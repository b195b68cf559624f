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

from precedent.runtime.failures import is_out_of_memory
from precedent.target import Slot, TargetModel
from precedent.tree import CandidateTree

Wanted = tuple[Slot, CandidateTree]
Drawing = Generator[Wanted, Tensor, None]
Extending = Generator[Wanted, Tensor, bool]
"""One token more, if one may follow."""


@dataclass(slots=True, eq=False)
class Drawer:
    """One request's drawing: what it wants scored next (None: it has ended), and what it failed of.

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

    def go_on(self, logits: Tensor | Exception | None) -> None:
        """Go on with what was scored, None at first; an exception is thrown where it was waited for."""
        try:
            failed = isinstance(logits, Exception)
            self.wanted = self.drawing.throw(logits) if failed else self.drawing.send(logits)  # type: ignore[arg-type]
        except StopIteration:
            self.wanted = None
        except Exception as error:
            self.wanted, self.error = None, error


@torch.inference_mode()
def draw_in_step(
    model: TargetModel, drawings: Sequence[Drawing | Extending], at_work: Callable[[], AbstractContextManager[object]]
) -> list[Drawer]:
    """Run all drawings to their ends, in as many forwards as the longest one needs; each fails alone.

    Forwards are made `at_work`: what the drawings do between them they do wherever they want.
    """
    drawers = [Drawer(drawing) for drawing in drawings]
    for drawer in drawers:
        started = perf_counter()
        drawer.go_on(None)
        drawer.seconds = perf_counter() - started
    while asking := [drawer for drawer in drawers if drawer.wanted is not None]:
        _round(model, asking, at_work)
    return drawers


def _round(model: TargetModel, asking: Sequence[Drawer], at_work: Callable[[], AbstractContextManager[object]]) -> None:
    """One forward for all of them, and what each makes of it.

    It is timed as a whole: a GPU has only begun when its forward returns, and the first that reads waits for all.
    """
    started, rows = perf_counter(), [drawer.rows for drawer in asking]
    with at_work():
        scored = _scored(model, [drawer.wanted for drawer in asking if drawer.wanted is not None])
    for drawer, logits in zip(asking, scored, strict=True):
        drawer.go_on(logits)
    seconds = perf_counter() - started
    for drawer, count in zip(asking, rows, strict=True):
        drawer.seconds += seconds * count / sum(rows)


def _scored(model: TargetModel, wanted: Sequence[Wanted]) -> list[Tensor | Exception]:
    """Logits for each; if the forward over all fails, each alone, so that only the guilty fails."""
    try:
        return [*model.score(wanted)]
    except Exception as error:
        failure = error
    if is_out_of_memory(failure):
        failure.with_traceback(None)  # its frames hold the very tensors that did not fit
    return [failure] if len(wanted) == 1 else [_scored(model, [each])[0] for each in wanted]
