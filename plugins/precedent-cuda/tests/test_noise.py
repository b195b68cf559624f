"""The noise of coupled sampling: exponential, independent, and the same whatever computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.random_trees import DRAFT_V4, TARGET_V4
from scipy.stats import kstest

from precedent.sampling.coupling import coupled_choice, noise_key
from precedent.tree import ROOT, TreeBuilder
from precedent.verify import verify
from precedent_cuda.noise import chosen, coupled_noise, exponential
from precedent_testing.replay_rng import ReplayRng


@pytest.mark.parametrize(("number", "expected"), [(1, 0.503030), (2, 0.7595), (3, 0.9400)])
def test_top_tokens_under_shared_noise_match_as_often_as_theory_says(number: int, expected: float) -> None:
    """One token: sum over x of 1 / sum over y of max(target ratio, draft ratio) (Daliri et al. 2408.07978)."""
    count, hits = 2_500, 0
    for seed in range(count):
        builder = TreeBuilder()
        for token in (DRAFT_V4 / coupled_noise(seed, 0, 4)).topk(number).indices.tolist():
            builder.add_fixed(ROOT, token, "draft")
        tree = builder.build()
        rows = toy_rows(lambda path: TARGET_V4, tree, seed)
        hits += verify(tree, rows, "coupled", ReplayRng()).num_accepted
    assert hits / count == pytest.approx(expected, abs=5 * 0.5 / count**0.5)


def test_the_rarest_noise_does_not_choose_a_token_without_probability() -> None:
    """A uniform number of exactly 0 once in 2^53: were its noise infinite, all scores would be 0 and token 0 chosen."""
    for uniform in (0.0, 1.0 - 2.0**-53):
        noise = exponential(torch.full((3,), uniform, dtype=torch.float64))
        assert int((torch.tensor([0.0, 0.0, 1e-300], dtype=torch.float64) / noise).argmax()) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_choice_is_the_argmax_of_probabilities_by_noise(dtype: torch.dtype) -> None:
    """What takes few logarithms against what takes all of them, on a row alone and on several at once."""
    sizes = (1, 7, 1023, 1024, 1025, 5000)
    for seed in range(120):
        generator, size = torch.Generator().manual_seed(seed), sizes[seed % len(sizes)]
        rows = torch.randn(3, size, generator=generator, dtype=dtype).mul((0.1, 1.0, 4.0)[seed % 3]).softmax(-1)
        rows[:, torch.rand(size, generator=generator) < 0.3 * (seed % 2)] = 0.0
        rows[:, -1] += 1e-3
        expected = [int((row.double() / coupled_noise(seed, place, size)).argmax()) for place, row in enumerate(rows)]
        assert [coupled_choice(row, seed, place) for place, row in enumerate(rows)] == expected
        assert chosen(rows, [noise_key(seed, place) for place in range(3)]).tolist() == expected


@pytest.mark.gpu
def test_on_cuda_the_choice_is_that_of_a_cpu() -> None:
    """The hash is exact on any device; logarithms may differ in the last bit, which no two scores here do."""
    rows = torch.randn(40, 128_256, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    keys = [noise_key(7, place % 5) for place in range(40)]
    expected = [coupled_choice(row, 7, place % 5) for place, row in enumerate(rows)]
    assert chosen(rows.cuda(), keys).tolist() == expected
    assert coupled_choice(rows[3].cuda(), 7, 3) == expected[3]


def test_the_noise_is_exponential_and_independent_between_neighbours() -> None:
    """Kolmogorov-Smirnov at 1e-4, over token ids of one place and over places and seeds of one token id."""
    by_token = coupled_noise(3, 0, 20_000).numpy()
    by_place = np.array([float(coupled_noise(5, place, 2)[1]) for place in range(4000)])
    by_seed = np.array([float(coupled_noise(seed, 0, 2)[1]) for seed in range(4000)])
    for noise in (by_token, by_place, by_seed):
        assert kstest(noise, "expon").pvalue > 1e-4
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 4 / len(noise) ** 0.5
