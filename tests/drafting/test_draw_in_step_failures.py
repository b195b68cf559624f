"""Drawing in step that fails: its own requests alone go on without it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.drawing import PROMPTS, AlwaysDraws, Watched, drafted, sequences, sessions, small_target
from torch import Tensor

from precedent.config import SamplingParams
from precedent.drafters.base import Draw, DrawSession
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.sampling.rng import CounterRng, Rng
from precedent.tree import TreeBuilder


def test_a_request_whose_drawing_fails_fails_alone() -> None:
    """The forward over all three fails, then each has its own; the others draw on."""
    draft = Watched(31)
    draft.guilty = PROMPTS[2][0]
    target, planner = small_target(), AlwaysDraws([2])
    running = sequences(target, DraftModelDrafter(draft), SamplingParams())
    proposals = drafted(running, planner)
    assert draft.batches == [3, 1, 1, 1, 2]
    assert [len(each.tree) for each in proposals] == [2, 2, 0]
    assert [each.error for each in running] == [None] * 3
    assert [list(each.sessions) for each in running] == [["draft-model"], ["draft-model"], []]
    assert len(planner.observed) == 2


class NoRng(CounterRng):
    """Random numbers that are not to be had."""

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """Raise."""
        raise RuntimeError("no random numbers left")


def test_an_exception_between_two_forwards_is_the_drawings_own() -> None:
    model = Watched(31)
    first, second, _ = sessions(DraftModelDrafter(model), "traversal")
    builder = TreeBuilder()
    broken, whole = Draw(first, TreeBuilder(), 2, NoRng(0, 0)), Draw(second, builder, 2, CounterRng(0, 0))
    first.draw_together([broken, whole])
    assert isinstance(broken.error, RuntimeError)
    assert whole.error is None
    assert len(builder) == 2
    assert model.batches == [2, 1]


class Broken(DrawSession):
    """Of a drafter that fails as a whole, when it draws for several."""

    group, behind = "broken", 0

    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Never asked."""

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Fail for nobody in particular."""
        raise RuntimeError("the drafter is broken")

    def committed(self, token_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def end(self) -> None:
        """Nothing is held."""


def test_a_drafter_that_fails_as_a_whole_fails_its_own_requests() -> None:
    """Those that draw elsewhere go on."""
    drafter = DraftModelDrafter(Watched(31))
    running = sequences(small_target(), drafter, SamplingParams())
    for each in running[:2]:
        each.sessions["draft-model"] = Broken()
    proposals = drafted(running, AlwaysDraws([2]))
    assert [len(each.tree) for each in proposals] == [0, 0, 2]
    assert [each.error for each in running] == [None] * 3
    assert [list(each.sessions) for each in running] == [[], [], ["draft-model"]]


def test_a_distribution_wider_than_the_targets_rows_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that does not cut its rows where the tokenizer ends, and one that samples an id beyond it."""
    caplog.set_level(logging.INFO)
    running = sequences(small_target(), DraftModelDrafter(Watched(31)), SamplingParams(temperature=1.0))
    for each in running[:2]:
        each.request = replace(each.request, num_tokens=20)  # its drafter was told of none
    proposals = drafted(running, AlwaysDraws([2]))
    assert "from a distribution of shape (24,), and the target chooses among 20 tokens" in caplog.text
    assert [len(each.tree) for each in proposals] == [0, 0, 2]
    assert [each.error for each in running] == [None] * 3
    assert [list(each.sessions) for each in running] == [[], [], ["draft-model"]]
