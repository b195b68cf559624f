"""Rows of probabilities: what logits become, one row alone and all rows of a tree."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.operations import Operations
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from precedent.config import SamplingParams
from precedent.errors import GenerationError
from precedent.sampling.constraints import constraints_for
from precedent.sampling.probabilities import largest_id, probs_of
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, chain

GRID = list(itertools.product([0.3, 0.7, 1.0, 1.8], [0, 1, 5, 1000], [1.0, 0.9, 0.5, 0.01], [0.0, 0.05, 0.5]))


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
    for temperature, top_k, top_p, min_p in GRID:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        logits = torch.randn(211, generator=generator, dtype=dtype) * 3
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_tokens", [2, 3, 10, 33, 259, 1000, 4096])
def test_top_p_keeps_the_same_of_equally_likely_tokens_in_every_row(dtype: torch.dtype, num_tokens: int) -> None:
    """As many as transformers, and always the same ones: a row alone, as of a draft, and among those of a tree."""
    for tenths in range(1, 10):
        params = SamplingParams(temperature=0.7, top_p=tenths / 10)
        rows = torch.zeros(3, num_tokens, dtype=dtype)
        rows[1, ::2] = 1.0
        rows[2, : num_tokens // 2] = -torch.inf
        together = probs_of(rows, params)
        for row, probs in zip(rows, together, strict=True):
            assert torch.equal(probs > 0, vllm_top_p(row / 0.7, tenths / 10) > 0)
            assert int((probs > 0).sum()) == int((reference(row, params) > 0).sum())
            assert torch.equal(probs > 0, probs_of(row, params) > 0)


def test_equal_logits_survive_top_k_together() -> None:
    """As in transformers, ties at the edge of top-k all stay."""
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert probs_of(logits, SamplingParams(temperature=1.0, top_k=1)).tolist() == [0.0, 0.5, 0.5, 0.0]


def test_masked_tokens_have_no_probability_under_any_warper() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    for temperature, top_k, top_p, min_p in GRID:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        probs = probs_of(logits, params)
        assert probs[0] == probs[2] == 0.0
        assert float(probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44, 1e-300])
def test_a_vanishing_temperature_is_the_argmax_and_never_nan(temperature: float) -> None:
    """Dividing large logits by a tiny number overflows float32."""
    probs = probs_of(torch.tensor([500.0, 400.0, -math.inf]), SamplingParams(temperature=temperature))
    assert probs.tolist() == [1.0, 0.0, 0.0]


def test_temperature_zero_is_one_hot_at_the_lowest_id_of_the_maximum() -> None:
    assert probs_of(torch.tensor([0.0, 3.0, 3.0]), SamplingParams()).tolist() == [0.0, 1.0, 0.0]


def test_half_precision_logits_become_float32_probabilities() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert probs_of(torch.zeros(4, dtype=dtype), SamplingParams(temperature=1.0)).dtype == torch.float32
    assert probs_of(torch.zeros(4, dtype=torch.float64), SamplingParams(temperature=1.0)).dtype == torch.float64


def test_rows_are_shaped_with_each_nodes_own_path_and_computed_once() -> None:
    """The committed answer comes first, then the path in the tree."""
    tree, seen = chain([4, 2]), []

    def shape(output_ids: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(output_ids))
        return row

    rows = TargetRows(torch.randn(3, 5), tree, SamplingParams(temperature=1.0), (9,), shape)
    for node in (ROOT, 0, 1, ROOT, 1):
        rows.probs(node)
    assert seen == [(9,), (9, 4), (9, 4, 2)]
    assert rows.argmax(0) == int(rows.logits(0).argmax())


@pytest.mark.parametrize("read", [False, True], ids=["row by row", "read together"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [(math.nan, "NaN or infinity"), (math.inf, "NaN or infinity"), (-math.inf, "every token is masked")],
)
def test_rows_that_cannot_be_sampled_say_where(bad: float, message: str, read: bool) -> None:
    """A broken forward pass or an impossible grammar ends this request, with the position."""
    logits = torch.zeros(2, 3)
    logits[1] = bad
    rows = TargetRows(logits, chain([1]), SamplingParams(temperature=1.0, seed=3), (7, 7))
    if read:
        rows.take_largest(largest_of_each(logits))
    rows.probs(ROOT)
    rows.check(ROOT)
    rows.argmax(ROOT)
    for ask in (rows.probs, rows.argmax, rows.coupled, rows.check):
        with pytest.raises(GenerationError, match=f"(?=.*position 3).*{message}"):
            ask(0)


def largest_of_each(logits: torch.Tensor) -> list[tuple[float, int]]:
    """Of each row the largest logit and its id, as verification on a GPU reads them."""
    values, ids = logits.max(-1)
    return list(zip(values.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shaped", [False, True])
def test_rows_constrained_together_are_the_very_rows(dtype: torch.dtype, shaped: bool) -> None:
    """Every combination of warpers, masked tokens, ties, and temperature 0; with and without constraints."""
    generator, tree = torch.Generator().manual_seed(5), chain([4, 2, 9])
    for temperature, top_k, top_p, min_p in [*GRID, (0.0, 0, 1.0, 0.0)]:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
        logits = (torch.randn(4, 61, generator=generator, dtype=torch.float64) * 3).round(decimals=1).to(dtype)
        logits[2, 5:20] = -math.inf
        shape = constraints_for(SamplingParams(repetition_penalty=1.3), [1, 2]) if shaped else None
        by_row = TargetRows(logits, tree, params, (8,), shape)
        together = TargetRows(logits, tree, params, (8,), shape).constrained()
        assert together is not None
        probs = together.probs_of(together.all_logits())
        together.take_largest(largest_of_each(together.all_logits()))
        for node in range(ROOT, len(tree)):
            assert torch.equal(together.logits(node), by_row.logits(node))
            assert torch.allclose(probs[node + 1], by_row.probs(node), rtol=0, atol=1e-15)
            assert torch.allclose(together.probs(node), probs[node + 1], rtol=0, atol=1e-15)
            assert together.argmax(node) == by_row.argmax(node)
            assert together.coupled(node) == by_row.coupled(node)
            by_row.check(node)
            together.check(node)


@pytest.mark.parametrize("read", [False, True], ids=["row by row", "read together"])
def test_rows_ask_for_no_more_than_they_must(read: bool) -> None:
    """On a CPU one row after the other; on a GPU nothing once the largest numbers of all rows were read."""
    counting = Operations()
    logits = torch.randn(4, 50, dtype=torch.bfloat16)
    rows = TargetRows(logits, chain([4, 2, 9]), SamplingParams())
    if read:
        rows.take_largest(largest_of_each(logits))
    with counting:
        for node in (ROOT, 0, 1):
            rows.argmax(node)
            rows.check(node)
    assert counting.names.count("view") == (0 if read else 6)
    assert counting.names.count("max") == 0
    assert not read or counting.names == []


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
