"""Tokens that a constraint forces are proposed; constraints that cannot tell are left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.request import Request
from precedent.sampling.constraints import Chain, RepetitionPenalty
from precedent.sampling.row_shaper import forced_tokens
from precedent_testing.drafter_contract import DrafterContract

END = 2


class Phrases:
    """Allows any token at every second place of three, and one token at the others: 5 x 7, 5 x 7, and so on."""

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Mask all but the forced token."""
        forced = self.forced(output_ids)
        if not forced:
            return row
        masked = torch.full_like(row, -torch.inf)
        masked[forced[0]] = row[forced[0]]
        return masked

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """What stands before the next free place."""
        return ((5,), (), (7, 5))[len(output_ids) % 3]


class Ending:
    """Forces the end, and claims to know more behind it."""

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Left as it is: only `forced` matters here."""
        return row

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """An end in the middle."""
        return (9, END, 8)


class TestGrammarContract(DrafterContract):
    """Forced tokens keep the drafter contract."""

    output = (5, 6, 7, 5, 8, 7, 5, 9, 7)

    def make_drafter(self) -> Drafter:
        """It needs nothing."""
        return GrammarDrafter()

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request under a constraint that forces two tokens of three."""
        return dataclasses.replace(super().make_request(prompt_ids), shape=SHAPE)


SHAPE = Phrases()


def test_forced_tokens_are_a_chain_and_nearly_certain() -> None:
    session = GrammarDrafter().begin(Request("r", (1,), SamplingParams(), shape=SHAPE))
    assert session.match(8).token_ids == [5]
    session.committed([5, 6])
    found = session.match(8)
    assert (found.token_ids, found.parents) == ([7, 5], [-1, 0])
    assert min(found.estimates) > 0.99
    assert session.match(1).token_ids == [7]
    session.committed([7, 5])
    assert len(session.match(8)) == 0


def test_a_constraint_that_cannot_tell_forces_nothing() -> None:
    for shape in (None, Chain([]), RepetitionPenalty((1, 2), 1.5)):
        session = GrammarDrafter().begin(Request("r", (1,), SamplingParams(), shape=shape))
        assert len(session.match(8)) == 0


def test_one_constraint_of_a_chain_is_enough_to_force() -> None:
    chain = Chain([RepetitionPenalty((2,), 1.5), Chain([Phrases()]), RepetitionPenalty((1,), 1.5)])
    assert forced_tokens(chain, [5, 6]) == (7, 5)
    assert forced_tokens(Chain([]), [5, 6]) == ()


def test_what_is_forced_is_the_only_token_left_in_the_row() -> None:
    """The promise that a constraint with `forced` makes, checked for the one used here."""
    output: list[int] = []
    for _ in range(9):
        for token in SHAPE.forced(output):
            row = SHAPE(output, torch.randn(16))
            assert row.isfinite().nonzero().flatten().tolist() == [token]
            output.append(token)
        output.append(6)


def test_nothing_hangs_below_a_forced_end() -> None:
    request = Request("r", (1,), SamplingParams(), shape=Ending(), end_token_ids=frozenset({END}))
    assert GrammarDrafter().begin(request).match(8).token_ids == [9, END]
