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

from precedent.target import Slot, TargetModel
from precedent.tree import CandidateTree

Wanted = tuple[Slot, CandidateTree]
Drawing = Generator[Wanted, Tensor, None]
Extending = Generator[Wanted, Tensor, bool]
"""One token more, if one may follow."""


@dataclass(slots=True, eq=False)
class Drawer:
    """One request's drawing: what it wants scored next (None: it has ended), and what it failed of.

    `seconds` are its own and its share of the forwards that it took part in.
    """

    drawing: Drawing | Extending
    wanted: Wanted | None = None
    seconds: float = 0.0
    error: Exception | None = None

    def go_on(self, logits: Tensor | Exception | None) -> None:
        """Go on with what was scored, None at first; an exception is thrown where it was waited for."""
        started = perf_counter()
        try:
            failed = isinstance(logits, Exception)
            self.wanted = self.drawing.throw(logits) if failed else self.drawing.send(logits)  # type: ignore[arg-type]
        except StopIteration:
            self.wanted = None
        except Exception as error:
            self.wanted, self.error = None, error
        self.seconds += perf_counter() - started


@torch.inference_mode()
def draw_in_step(
    model: TargetModel, drawings: Sequence[Drawing | Extending], at_work: Callable[[], AbstractContextManager[object]]
) -> list[Drawer]:
    """Run all drawings to their ends, in as many forwards as the longest one needs; each fails alone.

    Forwards are made `at_work`: what the drawings do between them they do wherever they want.
    """
    drawers = [Drawer(drawing) for drawing in drawings]
    for drawer in drawers:
        drawer.go_on(None)
    while asking := [drawer for drawer in drawers if drawer.wanted is not None]:
        started = perf_counter()
        with at_work():
            scored = _scored(model, [drawer.wanted for drawer in asking if drawer.wanted is not None])
        share = (perf_counter() - started) / len(asking)
        for drawer, logits in zip(asking, scored, strict=True):
            drawer.seconds += share
            drawer.go_on(logits)
    return drawers


def _scored(model: TargetModel, wanted: Sequence[Wanted]) -> list[Tensor | Exception]:
    """Logits for each; if the forward over all fails, each alone, so that only the guilty fails."""
    try:
        return [*model.score(wanted)]
    except Exception as error:
        return [error] if len(wanted) == 1 else [_scored(model, [each])[0] for each in wanted]
