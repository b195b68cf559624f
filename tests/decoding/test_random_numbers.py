"""Random numbers: functions of their key alone, uniform, and turned into tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chi2

from precedent.sampling.rng import CounterRng
from precedent.tree import ROOT


def test_random_numbers_depend_on_their_key_alone() -> None:
    """Not on the order of asking, nor on what else was asked; every part of the key counts."""
    keys = [(node, purpose) for node in range(-1, 5) for purpose in ("verify-accept", "verify-next", "sample 0")]
    forward, backward = CounterRng(7, 3), CounterRng(7, 3)
    first = {key: forward.uniform(*key) for key in keys}
    second = {key: backward.uniform(*key) for key in reversed(keys)}
    assert first == second
    others = [CounterRng(8, 3).uniform(*key) for key in keys] + [CounterRng(7, 4).uniform(*key) for key in keys]
    assert len({*first.values(), *others}) == 3 * len(keys)


@pytest.mark.parametrize("entropy", [0, -1, 2**200, -(2**63)])
def test_any_integer_is_entropy(entropy: int) -> None:
    """A seed is whatever integer the caller likes."""
    assert 0.0 <= CounterRng(entropy, 0).uniform(ROOT, "x") < 1.0
    assert CounterRng(entropy, 0).uniform(0, "x") != CounterRng(entropy + 1, 0).uniform(0, "x")


@pytest.mark.parametrize("vary", ["node", "step", "entropy", "purpose"])
def test_random_numbers_are_uniform_and_independent_along_every_part_of_the_key(vary: str) -> None:
    """Chi-square over 16 x 16 cells of neighbouring numbers, fixed entropy."""

    def uniform(number: int) -> float:
        key = {"node": 0, "step": 0, "entropy": 11, "purpose": 0, vary: number}
        return CounterRng(key["entropy"], key["step"]).uniform(key["node"], f"purpose {key['purpose']}")

    count, cells = 12_800, torch.zeros(16, 16, dtype=torch.float64)
    values = [uniform(number) for number in range(count + 1)]
    for left, right in itertools.pairwise(values):
        cells[int(left * 16), int(right * 16)] += 1
    statistic = float(((cells - count / 256) ** 2 / (count / 256)).sum())
    assert chi2.ppf(1e-6, 255) < statistic < chi2.ppf(1 - 1e-6, 255)


def test_bernoulli_never_takes_zero_and_always_takes_one() -> None:
    for step in range(2000):
        rng = CounterRng(5, step)
        assert not rng.bernoulli(0.0, 0, "x")
        assert rng.bernoulli(1.0, 0, "x")


def test_random_numbers_of_several_nodes_are_those_of_each() -> None:
    rng = CounterRng(5, 7)
    assert rng.uniforms(range(-1, 30), "x").tolist() == [rng.uniform(node, "x") for node in range(-1, 30)]
    assert rng.uniforms([], "x").shape == (0,)


class FixedUniform(CounterRng):
    """Random numbers whose uniform number is given."""

    def __init__(self, value: float) -> None:
        super().__init__(0, 0)
        self.value = value

    def uniform(self, node: int, purpose: str) -> float:
        return self.value


LARGEST = 1.0 - 2.0**-53


@pytest.mark.parametrize(("value", "expected"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.999, 3), (LARGEST, 3)], ids=str)
def test_categorical_inverts_the_cumulative_sum_and_never_hits_a_token_without_mass(
    value: float, expected: int
) -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    for scale in (1.0, 1e-30, 0.1, 1.1, 7.0):
        assert FixedUniform(value).categorical(weights * scale, 0, "x") == expected


def test_categorical_frequencies_match_the_weights() -> None:
    """Chi-square with fixed entropy; unnormalised weights."""
    weights, count = torch.tensor([0.5, 2.0, 0.0, 1.5]), 20_000
    counts = torch.zeros(4)
    for step in range(count):
        counts[CounterRng(2024, step).categorical(weights, 0, "x")] += 1
    expected = weights / weights.sum() * count
    assert counts[2] == 0
    statistic = float(((counts - expected) ** 2 / expected)[[0, 1, 3]].sum())
    assert statistic < chi2.ppf(1 - 1e-6, 2)
