"""Every sampled candidate carries the distribution it was sampled from."""

from __future__ import annotations

import pytest
from helpers.random_trees import DRAFT_V4

from precedent.config import SamplingParams
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.sampling.constraints import constraints_for
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.tree import ROOT, Sampled, TreeBuilder
from precedent_testing.draft_distribution import check_draft_distribution, draft_distribution_error
from precedent_testing.tiny_models import tiny_causal_lm


@pytest.mark.parametrize("fixed", [(), (1,), (0, 2)])
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
def test_the_draft_model_reports_the_distribution_it_samples(sampling: SamplingParams, fixed: tuple[int, ...]) -> None:
    """A real tiny transformer: temperature, truncation, penalties, cached siblings, two samples deep."""
    model = TargetModel(tiny_causal_lm("llama", seed=3, vocab_size=4, num_hidden_layers=1, hidden_size=16, scale=0.3))
    prompt = [1, 2, 1]
    shape = constraints_for(sampling, prompt)

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        request = Request("test", tuple(prompt), sampling, mode="traversal", shape=shape)
        session = DraftModelDrafter(model).begin(request)
        for token in fixed:
            builder.add_fixed(ROOT, token, "cache")
        session.draw(builder, 2, rng)

    check_draft_distribution(drawing)


def test_a_distribution_that_was_not_sampled_is_seen() -> None:
    """Sampled at another temperature than reported; sampled without a sibling that is not excluded."""
    warped = DRAFT_V4**2 / (DRAFT_V4**2).sum()

    def warping(builder: TreeBuilder, rng: Rng) -> None:
        builder.add_sampled(ROOT, rng.categorical(warped, ROOT, "draft"), Sampled(DRAFT_V4), "draft")

    def excluding(builder: TreeBuilder, rng: Rng) -> None:
        distribution = Sampled(DRAFT_V4, (builder.token_ids[builder.add_fixed(ROOT, 0, "cache")],))
        builder.add_sampled(ROOT, rng.categorical(distribution.probs(), ROOT, "draft"), Sampled(DRAFT_V4), "draft")

    assert draft_distribution_error(warping) == pytest.approx(0.5 * float((warped - DRAFT_V4).abs().sum()))
    assert draft_distribution_error(excluding) == pytest.approx(0.45)
    with pytest.raises(AssertionError, match=r"differs by 0\.45"):
        check_draft_distribution(excluding)
