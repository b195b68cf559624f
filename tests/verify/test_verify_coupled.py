"""Shared-noise coupling: the text is a function of the noise, and the noise has the right distribution."""

from __future__ import annotations

import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.random_trees import TARGET_V4, random_problem, toy_model
from scipy.stats import chi2

from precedent.config import SamplingParams
from precedent.sampling.coupling import coupled_choice
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import EMPTY_TREE, ROOT, chain
from precedent.verify import verify
from precedent_testing.replay_rng import ReplayRng


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


def test_target_rows_choose_by_seed_and_position_in_the_output() -> None:
    """The same seed at the same position of the output, whether reached by committing or inside a tree."""
    logits, tree = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), chain([4, 2])
    params = SamplingParams(temperature=1.0, seed=9)
    inside = TargetRows(logits, tree, params, (7,))
    for node, output_ids in ((ROOT, (7,)), (0, (7, 4)), (1, (7, 4, 2))):
        committed = TargetRows(logits[node + 1 :], EMPTY_TREE, params, output_ids)
        assert inside.coupled(node) == committed.coupled(ROOT)
