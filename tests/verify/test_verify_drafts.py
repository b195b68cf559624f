"""Whatever draws reports the law it samples from."""

from __future__ import annotations

import pytest
import torch

from precedent.config import SamplingParams
from precedent.constraints import constraints_for
from precedent.drafters.base import DraftRequest
from precedent.drafters.draft_model import DraftModelDrafter
from precedent.sampling import Coins
from precedent.target import TargetModel
from precedent.testing.draft_law import check_draft_law, draft_law_error
from precedent.testing.random_trees import random_problem
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.tree import ROOT, Drawn, TreeBuilder

DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)


@pytest.mark.parametrize("points", [(), (1,), (0, 2)])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=2, repetition_penalty=1.5),
        SamplingParams(temperature=1.4, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=0.9, frequency_penalty=1.1, presence_penalty=0.5, logit_bias={2: 0.8, 3: -1}),
    ],
    ids=["temperature", "top-k and penalty", "top-p and min-p", "penalties of the answer and a bias"],
)
def test_the_draft_model_reports_the_law_it_samples(sampling: SamplingParams, points: tuple[int, ...]) -> None:
    """A real tiny transformer: temperature, truncation, penalties, cached siblings, two draws deep."""
    model = TargetModel(tiny_causal_lm("llama", seed=3, vocab_size=4, num_hidden_layers=1, hidden_size=16, scale=0.3))
    prompt = [1, 2, 1]
    shape = constraints_for(sampling, prompt)

    def drawing(builder: TreeBuilder, coins: Coins) -> None:
        request = DraftRequest("test", tuple(prompt), sampling, mode="traversal", shape=shape)
        drafting = DraftModelDrafter(model).begin(request)
        for token in points:
            builder.add_point(ROOT, token, "cache")
        drafting.draw(builder, 2, coins)

    check_draft_law(drawing)


def test_random_drafts_report_the_laws_they_sample() -> None:
    """The drafts of the law tests themselves: replacement, exclusion, keep_mask, several models."""
    for seed in range(1000, 1040):
        problem = random_problem(seed, max_trees=81)
        if problem.plan.threshold is not None and problem.plan.without_replacement:
            continue  # a swallowed token is excluded from the next draw, but the tree does not show which it was

        def drawing(builder: TreeBuilder, coins: Coins, problem=problem) -> None:
            tree = problem.draft(coins)
            builder.token_ids, builder.parents = list(tree.token_ids), list(tree.parents)
            builder.sources = [list(names) for names in tree.sources]
            builder._drawn = list(tree.draws)

        check_draft_law(drawing, 1e-12)


def test_a_law_that_was_not_sampled_is_seen() -> None:
    """Sampled at another temperature than reported; sampled without a sibling that the law does not exclude."""
    warped = DRAFT_V4**2 / (DRAFT_V4**2).sum()

    def warping(builder: TreeBuilder, coins: Coins) -> None:
        builder.add_draw(ROOT, coins.categorical(warped, ROOT, "draft"), Drawn(DRAFT_V4), "draft")

    def excluding(builder: TreeBuilder, coins: Coins) -> None:
        law = Drawn(DRAFT_V4, (builder.token_ids[builder.add_point(ROOT, 0, "cache")],))
        builder.add_draw(ROOT, coins.categorical(law.probs(), ROOT, "draft"), Drawn(DRAFT_V4), "draft")

    assert draft_law_error(warping) == pytest.approx(0.5 * float((warped - DRAFT_V4).abs().sum()))
    assert draft_law_error(excluding) == pytest.approx(0.45)
    with pytest.raises(AssertionError, match=r"differs by 0\.45"):
        check_draft_law(excluding)
