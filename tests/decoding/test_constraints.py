"""What changes rows before sampling: penalties, biases, and constraints that fail."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from precedent.config import SamplingParams
from precedent.errors import GenerationError
from precedent.sampling.constraints import Chain, LogitBias, OccurrencePenalty, RepetitionPenalty, constraints_for
from precedent.sampling.row_shaper import RowShaper, shaped_rows
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, chain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_repetition_penalty_is_that_of_transformers_and_leaves_the_logits_alone(dtype: torch.dtype) -> None:
    """A penalty written into the model's buffer would apply twice when a row is asked for twice."""
    logits = (torch.randn(20, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    before = logits.clone()
    shape = constraints_for(SamplingParams(repetition_penalty=1.7), [3, 5, 5])
    assert shape is not None
    mine = shape((7, 3), logits)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 5, 5, 7, 3]]), logits.to(mine.dtype)[None])[0]
    assert torch.equal(mine, theirs)
    assert torch.equal(logits, before)


def test_the_repetition_penalty_takes_an_empty_text() -> None:
    shape = constraints_for(SamplingParams(repetition_penalty=2.0), [])
    assert shape is not None
    assert shape((), torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_the_repetition_penalty_passes_over_ids_that_a_row_does_not_have() -> None:
    """A prompt of raw ids may hold one that only the padded output head knows."""
    shape = constraints_for(SamplingParams(repetition_penalty=2.0), [1, 9])
    assert shape is not None
    assert shape((2, 8), torch.ones(3)).tolist() == [1.0, 0.5, 0.5]


def openais_logits(logits: torch.Tensor, output: Sequence[int], params: SamplingParams) -> list[float]:
    """Token by token as OpenAI's documentation writes it, behind the bias and transformers' repetition penalty."""
    found = []
    for token, logit in enumerate(logits.tolist()):
        count = list(output).count(token)
        value = logit + params.logit_bias.get(token, 0.0)
        if count:
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        found.append(value - count * params.frequency_penalty - (count > 0) * params.presence_penalty)
    return found


@given(
    st.lists(st.integers(0, 11), max_size=8),
    st.builds(
        SamplingParams,
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-100, 100), max_size=4),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
    ),
)
def test_penalties_and_biases_are_openais(output: list[int], params: SamplingParams) -> None:
    """For any text, with ids among it that the row does not have."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 4
    shape = constraints_for(params, ()) or (lambda _, row: row)
    assert shape(output, logits).tolist() == pytest.approx(openais_logits(logits, output, params), abs=1e-12)


def test_the_prompt_does_not_count_for_the_penalties_of_the_answer() -> None:
    shape = constraints_for(SamplingParams(frequency_penalty=1.0, presence_penalty=0.5), [1, 1, 1])
    assert shape is not None
    assert shape((2, 2), torch.zeros(3)).tolist() == [0.0, 0.0, -2.5]


SHAPES = [
    RepetitionPenalty([3, 5, 40], 1.7),
    OccurrencePenalty(0.3, 0.7),
    OccurrencePenalty(0.0, -1.1),
    LogitBias({3: 0.1, 7: -100.0, 19: 33.3}),
    Chain([LogitBias({3: 0.1}), RepetitionPenalty([3], 1.7), OccurrencePenalty(0.3, 0.7)]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_all_rows_are_shaped_as_each_of_them_is(dtype: torch.dtype, shape: RowShaper) -> None:
    """Paths of a tree and paths that share nothing, ids that rows do not have, and the same path twice."""
    logits = (torch.randn(5, 20, generator=torch.Generator().manual_seed(4)) * 4).to(dtype)
    logits[1, 3] = logits[2, 7] = -math.inf
    before = logits.clone()
    for paths in (
        [(7, 3, 7), (7, 3, 7, 1), (7, 3, 7, 3, 19), (7, 3, 7, 7), (7, 3, 7, 90, 90)],
        [(7, 3), (7, 3, 1), (7, 3, 1, 19), (7, 3, 2), (7, 3, 90)],
        [(), (1,), (2,), (19, 18, 17), (19, 18, 17)],
        [(6,)] * 5,
    ):
        together = shaped_rows(shape, paths, logits, math.inf)
        assert together is not None
        assert torch.equal(together, torch.stack([shape(*one) for one in zip(paths, logits, strict=True)]))
    assert torch.equal(logits, before)


class Failing(RepetitionPenalty):
    """Behind token 2."""

    def __call__(self, output_ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        if output_ids[-1:] == (2,):
            raise GenerationError("too complex")
        return super().__call__(output_ids, row)

    def shape_all(self, paths: Sequence[tuple[int, ...]], rows: torch.Tensor, until: float) -> torch.Tensor:
        return torch.stack([self(*one) for one in zip(paths, rows, strict=True)])


@pytest.mark.parametrize("tried", [False, True], ids=["row by row", "tried together"])
@pytest.mark.parametrize("shape", [Failing([3], 1.5), Failing([3], 1.5).__call__], ids=["all rows", "each row"])
def test_a_constraint_that_fails_at_a_node_fails_only_what_asks_for_its_row(tried: bool, shape: RowShaper) -> None:
    """A grammar may become too complex behind a branch that is never taken."""
    params, logits = SamplingParams(temperature=0.5, seed=1), torch.randn(4, 20)
    rows = TargetRows(logits, chain([4, 2, 9]), params, (7,), shape)
    fine = TargetRows(logits, chain([4, 2, 9]), params, (7,), RepetitionPenalty([3], 1.5))
    assert not tried or rows.constrained() is None
    for node in (ROOT, 0, 2):
        assert torch.equal(rows.probs(node), fine.probs(node))
        assert torch.equal(rows.logits(node), fine.logits(node))
        assert rows.argmax(node) == fine.argmax(node)
    for ask in (rows.probs, rows.argmax, rows.coupled, rows.logits):
        with pytest.raises(GenerationError, match="too complex"):
            ask(1)


@pytest.mark.parametrize("fails", [False, True])
def test_rows_go_when_nobody_holds_them(fails: bool) -> None:
    """They are large: they cannot wait for the garbage collector."""
    rows = TargetRows(torch.randn(3, 20), chain([4, 2 if fails else 1]), SamplingParams(), (), Failing([3], 1.5))
    together = rows.constrained()
    assert (together is None) is fails
    gone = [weakref.ref(each) for each in (rows, together) if each is not None]
    for each in (rows, together):
        if each is not None:
            each.argmax(ROOT)
    gc.disable()
    try:
        del rows, together, each
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_where_nothing_is_asked_for_there_are_no_constraints() -> None:
    assert constraints_for(SamplingParams(temperature=0.5), [1]) is None
