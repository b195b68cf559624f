"""Shared-noise coupling: the text is a function of the noise, and the noise has the right distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.random_trees import random_problem, toy_model
from scipy.stats import chi2, kstest

from precedent.config import SamplingParams
from precedent.errors import ConfigError
from precedent.sampling.coupling import chosen, coupled_choice, coupled_noise, exponential, noise_key
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder, chain
from precedent.verify import verify
from precedent_testing.replay_rng import ReplayRng

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)


def plain_text(target, seed: int, length: int) -> list[int]:
    """Plain decoding under the same noise."""
    text: list[int] = []
    while len(text) < length:
        text.append(coupled_choice(target(tuple(text)), seed, len(text)))
    return text


@pytest.mark.parametrize("seed", range(30))
def test_the_text_is_the_same_whatever_was_proposed(seed: int) -> None:
    """Several steps over random trees (fixed, sampled, useless candidates) commit the tokens of plain decoding."""
    problem = random_problem(seed, max_trees=81)
    target = toy_model((seed, "text"), problem.vocab_size)
    text: list[int] = []
    for step in range(6):
        tree = problem.draft(CounterRng(seed, step))
        rows = toy_rows(lambda path, before=tuple(text): target((*before, *path)), tree, seed, len(text))
        verdict = verify(tree, rows, "coupled", ReplayRng())
        text += [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    assert text == plain_text(target, seed, len(text))


def test_the_chosen_token_has_the_targets_distribution_at_every_position() -> None:
    """The Gumbel-max trick: chi-square over 6,000 (seed, position) pairs; neighbours are independent."""
    pairs = torch.zeros(4, 4, dtype=torch.float64)
    count, previous = 6_000, 0
    for number in range(count + 1):
        token = coupled_choice(TARGET_V4, number // 10, number % 10)
        if number:
            pairs[previous, token] += 1
        previous = token
    expected = TARGET_V4[:, None] * TARGET_V4 * count
    assert float(((pairs - expected) ** 2 / expected).sum()) < chi2.ppf(1 - 1e-6, 15)


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


def test_target_rows_choose_by_seed_and_position_in_the_output() -> None:
    """The same seed at the same position of the output, whether reached by committing or inside a tree."""
    logits, tree = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), chain([4, 2])
    params = SamplingParams(temperature=1.0, seed=9)
    inside = TargetRows(logits, tree, params, (7,))
    for node, output_ids in ((ROOT, (7,)), (0, (7, 4)), (1, (7, 4, 2))):
        committed = TargetRows(logits[node + 1 :], EMPTY_TREE, params, output_ids)
        assert inside.coupled(node) == committed.coupled(ROOT)


def test_the_rarest_noise_does_not_choose_a_token_without_probability() -> None:
    """A uniform number of exactly 0 once in 2^53: were its noise infinite, all scores would be 0 and token 0 chosen."""
    for uniform in (0.0, 1.0 - 2.0**-53):
        noise = exponential(torch.full((3,), uniform, dtype=torch.float64))
        assert int((torch.tensor([0.0, 0.0, 1e-300], dtype=torch.float64) / noise).argmax()) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_choice_is_the_argmax_of_probabilities_by_noise(dtype: torch.dtype) -> None:
    """What takes few logarithms against what takes all of them, on a row alone and on several at once."""
    sizes = (1, 7, 1023, 1024, 1025, 5000)
    for seed in range(300):
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


def test_coupled_without_a_seed_is_refused() -> None:
    """Fresh entropy cannot fix a text."""
    rows = TargetRows(torch.zeros(1, 3), EMPTY_TREE, SamplingParams(temperature=1.0))
    with pytest.raises(ConfigError, match="needs a seed"):
        verify(EMPTY_TREE, rows, "coupled", ReplayRng())
