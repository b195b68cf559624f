"""A runner asks its backends in order; the model's own forward computes what none of them supports."""

from __future__ import annotations

import torch
from helpers.hybrids import prefilled, random_ids
from torch import Tensor

from precedent.target import TargetModel
from precedent.target.kv.rows import Forward
from precedent.target.support import Backend
from precedent.tree import EMPTY_TREE
from precedent_testing.tiny_models import tiny_causal_lm


class Upto(Backend):
    """Supports forwards of at most `rows` rows, for which it returns one number everywhere."""

    def __init__(self, rows: int, number: float = 0.0, *, settled: bool = True) -> None:
        self.rows, self.number, self.settled = rows, number, settled
        self.asked = 0

    def logits(self, forward: Forward) -> Tensor | None:
        self.asked += 1
        count = forward.spans[-1][1]
        return torch.full((count, 300), self.number) if count <= self.rows else None


def test_the_first_backend_that_supports_a_forward_computes_it() -> None:
    target = TargetModel(tiny_causal_lm())
    first, second = Upto(1, 1.0), Upto(3, 2.0)
    slots = [prefilled(target, random_ids(1, 5)) for _ in range(4)]
    own = target.plain_step(slots[0])
    target.runner.backends = [first, second]
    found = [target.score([(slot, EMPTY_TREE) for slot in slots[:count]]) for count in (1, 2, 4)]
    assert [rows[0][0, 0].item() for rows in found[:2]] == [1.0, 2.0]
    torch.testing.assert_close(found[2], [own] * 4)
    assert (first.asked, second.asked) == (3, 2)


def test_a_step_settles_only_if_every_backend_says_so() -> None:
    """A backend that refused a forward may take the next one like it, and would change what it costs."""
    target = TargetModel(tiny_causal_lm())
    slot = prefilled(target, random_ids(1, 5))
    for settled in (True, False):
        target.runner.backends = [Upto(0), Upto(0, settled=settled)]
        target.plain_step(slot)
        assert target.settled == settled


def test_prompts_are_filled_by_a_backend_unless_a_drafter_reads_every_hidden_state() -> None:
    target = TargetModel(tiny_causal_lm())
    backend = Upto(99)
    target.runner.backends = [backend]
    prefilled(target, random_ids(1, 5))
    assert backend.asked == 1
    target.keep_hidden_states()
    prefilled(target, random_ids(1, 5))
    assert backend.asked == 1
