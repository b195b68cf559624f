"""Sampling: what may be asked, what logits become under it, and the random numbers that choose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from precedent.config import SamplingParams
from precedent.errors import GenerationError
from precedent.sampling.constraints import constraints_for, repetition_penalty
from precedent.sampling.probabilities import largest_id, probs_of
from precedent.sampling.rng import CounterRng, categorical_rows
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, chain

# Settings


# Probabilities, of one row alone and of all rows of a tree


GRID = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
    for temperature, top_k, top_p, min_p in itertools.product(
        [0.3, 0.7, 1.0, 1.8], [0, 1, 5, 1000], [1.0, 0.9, 0.5, 0.01], [0.0, 0.05, 0.5]
    )
]


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' own `generate` would sample from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits[None])[0].softmax(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_probabilities_are_those_of_transformers_warpers(dtype: torch.dtype) -> None:
    """Every combination of temperature, top-k, top-p and min-p; the same tokens survive with the same mass."""
    generator = torch.Generator().manual_seed(3)
    for params in GRID:
        logits = torch.randn(211, generator=generator, dtype=dtype) * 3
        logits[[3, 50]] = -math.inf
        mine, theirs = probs_of(logits, params), reference(logits, params)
        assert torch.equal(mine > 0, theirs > 0), params
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6), params


def vllm_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The definition in vLLM's sampler, which drops the least likely tokens up to a mass of 1 - top_p, in one order."""
    ordered, index = logits.sort(descending=False, stable=True)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[-1] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), -torch.inf).softmax(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("logits", "top_p", "kept"),
    [
        ([0, 0, 0, 0], 0.5, [2, 3]),
        ([0, 0, 0, 0], 0.75, [1, 2, 3]),
        ([0, 0, 0, 0], 0.25, [3]),
        ([0, 0, 0, 0], 0.01, [3]),
        ([0, 0, 0, 0], 0.51, [1, 2, 3]),
        ([5, -math.inf, 5, -math.inf], 0.5, [2]),
        ([5, -math.inf, 5, -math.inf], 0.75, [0, 2]),
        ([3, 1, 1, 3, 1, 0], 0.85, [0, 3, 4]),
        ([3, 1, 1, 3, 1, 0], 0.9, [0, 2, 3, 4]),
    ],
)
def test_top_p_on_exact_ties_is_that_of_transformers_and_vllm(
    dtype: torch.dtype, logits: list[float], top_p: float, kept: list[int]
) -> None:
    """A tail of exactly 1 - top_p goes; of equally likely tokens at the edge, those with the lowest ids go first."""
    row, params = torch.tensor(logits, dtype=dtype), SamplingParams(temperature=1.0, top_p=top_p)
    mine = probs_of(row, params)
    assert (mine > 0).nonzero().flatten().tolist() == kept
    for theirs in (reference(row, params), vllm_top_p(row, top_p)):
        assert torch.equal(mine > 0, theirs > 0)
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)


def test_edges_of_temperature_ties_and_precision() -> None:
    """As in transformers, ties at the edge of top-k all stay; dividing by a tiny number never overflows."""
    tied = SamplingParams(temperature=1.0, top_k=1)
    assert probs_of(torch.tensor([1.0, 2.0, 2.0, 0.0]), tied).tolist() == [0.0, 0.5, 0.5, 0.0]
    for temperature in (1e-6, 1e-30, 1e-44, 1e-300):
        probs = probs_of(torch.tensor([500.0, 400.0, -math.inf]), SamplingParams(temperature=temperature))
        assert probs.tolist() == [1.0, 0.0, 0.0]
    assert probs_of(torch.tensor([0.0, 3.0, 3.0]), SamplingParams()).tolist() == [0.0, 1.0, 0.0], "the lowest id"
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = probs_of(torch.zeros(4, dtype=dtype), SamplingParams(temperature=1.0))
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("bad", "message"),
    [(math.nan, "NaN or infinity"), (math.inf, "NaN or infinity"), (-math.inf, "every token is masked")],
)
def test_rows_that_cannot_be_sampled_say_where(bad: float, message: str) -> None:
    """A broken forward pass or an impossible grammar ends this request, with the position."""
    logits = torch.zeros(2, 3)
    logits[1] = bad
    rows = TargetRows(logits, chain([1]), SamplingParams(temperature=1.0, seed=3), (7, 7))
    rows.probs(ROOT)
    rows.argmax(ROOT)
    for ask in (rows.probs, rows.argmax, rows.coupled):
        with pytest.raises(GenerationError, match=f"(?=.*position 3).*{message}"):
            ask(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_number_of_a_row_is_torchs_own(dtype: torch.dtype) -> None:
    """Lowest id on ties, the first NaN, and rows that do not lie in one piece."""
    rows = torch.randn(50, 300, generator=torch.Generator().manual_seed(8)).to(dtype)
    rows[7, [40, 30]] = rows[8, [299, 2]] = 100.0
    rows[9, [5, 6]] = float("nan")
    rows[10] = float("-inf")
    rows[11] = -rows[11].abs() - 1.0  # no positive number
    rows[12], rows[12, [3, 4]] = -1.0, torch.tensor([-0.0, 0.0], dtype=dtype)
    rows[13, 20] = -torch.tensor(float("nan"), dtype=dtype)  # the sign that processors give to 0 times infinity
    rows[14, 21] = float("inf")
    for row in (*rows, *rows[:, ::3]):
        assert largest_id(row) == int(row.argmax())
    assert largest_id(rows[7]) == 30


# Penalties, biases, and constraints that fail


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


PENALTY = repetition_penalty([3], 1.5)


def failing(output_ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """Behind token 2."""
    if output_ids[-1:] == (2,):
        raise GenerationError("too complex")
    return PENALTY(output_ids, row)


def test_a_constraint_that_fails_at_a_node_fails_only_what_asks_for_its_row() -> None:
    """A grammar may become too complex behind a branch that is never taken."""
    params, logits = SamplingParams(temperature=0.5, seed=1), torch.randn(4, 20)
    rows = TargetRows(logits, chain([4, 2, 9]), params, (7,), failing)
    fine = TargetRows(logits, chain([4, 2, 9]), params, (7,), PENALTY)
    for node in (ROOT, 0, 2):
        assert torch.equal(rows.probs(node), fine.probs(node))
        assert torch.equal(rows.logits(node), fine.logits(node))
        assert rows.argmax(node) == fine.argmax(node)
    for ask in (rows.probs, rows.argmax, rows.coupled, rows.logits):
        with pytest.raises(GenerationError, match="too complex"):
            ask(1)


# Random numbers


def test_random_numbers_depend_on_their_key_alone() -> None:
    """Not on the order of asking, nor on what else was asked; every part of the key counts."""
    keys = [(node, purpose) for node in range(-1, 5) for purpose in ("verify-accept", "verify-next", "sample 0")]
    forward, backward = CounterRng(7, 3), CounterRng(7, 3)
    first = {key: forward.uniform(*key) for key in keys}
    assert first == {key: backward.uniform(*key) for key in reversed(keys)}
    others = [CounterRng(8, 3).uniform(*key) for key in keys] + [CounterRng(7, 4).uniform(*key) for key in keys]
    assert len({*first.values(), *others}) == 3 * len(keys)
    assert forward.uniforms(range(-1, 30), "x").tolist() == [forward.uniform(node, "x") for node in range(-1, 30)]
    assert forward.uniforms([], "x").shape == (0,)


LARGEST = 1.0 - 2.0**-53


@pytest.mark.parametrize(("value", "expected"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.999, 3), (LARGEST, 3)], ids=str)
def test_categorical_inverts_the_cumulative_sum_and_never_hits_a_token_without_mass(
    value: float, expected: int
) -> None:
    class Fixed(CounterRng):
        def uniform(self, node: int, purpose: str) -> float:
            return value

    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    for scale in (1.0, 1e-30, 0.1, 1.1, 7.0):
        assert Fixed(0, 0).categorical(weights * scale, 0, "x") == expected
    smallest = torch.tensor([0.0, 5e-324, 0.0], dtype=torch.float64)  # a number times it is rounded to it, or to 0
    assert Fixed(0, 0).categorical(smallest, 0, "x") == 1


def test_tokens_of_all_rows_are_those_of_one_row_after_the_other() -> None:
    """Rows that sum to anything, with nothing in front, behind, or but in one place; numbers at both ends."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 30, generator=generator)
    weights[torch.rand(200, 30, generator=generator) < 0.5] = 0.0
    weights[:, :3], weights[::2, -4:], weights[:, 7] = 0.0, 0.0, 0.1
    weights[0] = 0.0
    weights[0, 11] = 1e-9
    rng = CounterRng(3, 0)
    expected = [rng.categorical(row, number, "x") for number, row in enumerate(weights)]
    assert categorical_rows(weights, torch.from_numpy(rng.uniforms(range(200), "x"))).tolist() == expected
    for uniform in (0.0, 1.0 - 2.0**-53):
        found = categorical_rows(weights, torch.full((200,), uniform, dtype=torch.float64))
        assert weights.gather(1, found[:, None]).gt(0).all(), "a token without mass is never sampled"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_of_a_tree_are_normalised_together_as_each_of_them_alone(dtype: torch.dtype) -> None:
    """Every combination of warpers, masked tokens, ties, and temperature 0."""
    generator = torch.Generator().manual_seed(5)
    for params in [*GRID, SamplingParams(seed=1)]:
        logits = (torch.randn(4, 61, generator=generator, dtype=torch.float64) * 3).round(decimals=1).to(dtype)
        logits[2, 5:20] = -math.inf
        alone = torch.stack([probs_of(row, params) for row in logits])
        assert torch.allclose(probs_of(logits, params), alone, rtol=0, atol=1e-15)


CERTAIN = (1e-6, 1 - 1e-6)


@pytest.mark.parametrize("vary", ["node", "step", "entropy", "purpose"])
def test_random_numbers_are_uniform_and_independent_along_every_part_of_the_key(vary: str) -> None:
    """Chi-square over 16 x 16 cells of neighbouring numbers."""

    def uniform(number: int) -> float:
        key = {"node": 0, "step": 0, "entropy": 11, "purpose": 0, vary: number}
        return CounterRng(key["entropy"], key["step"]).uniform(key["node"], f"purpose {key['purpose']}")

    count, cells = 12_800, torch.zeros(16, 16, dtype=torch.float64)
    for left, right in itertools.pairwise(uniform(number) for number in range(count + 1)):
        cells[int(left * 16), int(right * 16)] += 1
    statistic = float(((cells - count / 256) ** 2 / (count / 256)).sum())
    assert chi2.ppf(CERTAIN[0], 255) < statistic < chi2.ppf(CERTAIN[1], 255)
