"""The number of threads may change between two forwards: the rows of trees stay the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.row_models import BY_ROWS, DIM, PROMPT, GivenTeam, equal, fused_layers, model_by_rows, stored, wide_tree

from precedent.target import TargetModel
from precedent_cpu.row_attention import fits

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """More threads than a small machine has processors, so that a team can change."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def decoded(target: TargetModel, team: GivenTeam) -> list[torch.Tensor]:
    """Logits of steps with trees of changing widths behind a prompt, and the keys and values that they leave."""
    target.runner.team = GivenTeam(2)
    slot, found = target.new_slot(), []
    target.prefill(slot, PROMPT)  # a prompt's products are torch's own and may round otherwise with other threads
    target.runner.team = team
    for size in (0, 5, 17, 0, 30, 2, 9, 40):
        logits = target.score([(slot, wide_tree(size))])[0]
        found.append(logits.clone())
        target.commit(slot, wide_tree(size), [], int(logits[0].argmax()))
    return [*found, *stored(slot)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["biases, no groups", "qwen3", "gemma", "whole tiles"])
@pytest.mark.sampled(3)
def test_rows_do_not_depend_on_the_team(name: str, dtype: torch.dtype) -> None:
    architecture, settings = BY_ROWS[name]
    target = TargetModel(model_by_rows(architecture, dtype, **settings))
    assert fused_layers(target) == 3
    expected = decoded(target, GivenTeam(1))
    for sizes in ((2,), (3, 1, 2)):
        team = GivenTeam(*sizes)
        assert equal(decoded(target, team), expected)
        assert set(team.chosen) == set(sizes)
