"""A block draft leaves the distribution of its target as it is: every branch of a step, enumerated."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers.enumeration import exact_step
from helpers.hybrids import prefilled
from helpers.tiny_block import tiny_block_draft
from torch import Tensor

from precedent.config import SamplingParams
from precedent.drafters.base import DrawSession
from precedent.drafters.request import Request
from precedent.sampling.constraints import constraints_for
from precedent.sampling.rng import CounterRng, Rng
from precedent.target import TargetModel
from precedent.testing.draft_distribution import check_draft_distribution
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent_drafts.block_drafter import BlockDrafter
from precedent_drafts.block_model import BlockModel

PROMPT = [1, 2, 1, 0]
EXACT = 1e-12


@cache
def pair(proposes: str, head: tuple[int, ...] = (0, 1, 2)) -> tuple[TargetModel, BlockModel]:
    """A target of three tokens, and a draft with strong opinions of its own."""
    target = TargetModel(tiny_causal_lm(vocab_size=3, hidden_size=16, num_hidden_layers=3, scale=0.3, seed=4))
    draft = tiny_block_draft(target.model, head, proposes=proposes, block_size=2, head_dim=4)
    return target, BlockModel(draft, target)


def request(target: TargetModel, sampling: SamplingParams, mode: str) -> Request:
    slot, shape = prefilled(target, PROMPT), constraints_for(sampling, PROMPT)
    return Request("r", tuple(PROMPT), sampling, mode=mode, shape=shape, target_slot=lambda: slot)


@cache
def next_token(after: tuple[int, ...]) -> Tensor:
    """The target's own distribution behind the prompt and these tokens."""
    with torch.inference_mode():
        return pair("tree")[0].model(torch.tensor([[*PROMPT, *after]])).logits[0, -1].softmax(-1)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_tree_of_candidates_is_exact(mode: str, budget: int) -> None:
    """Whatever the estimates are; and it is accepted now and then."""
    target, model = pair("tree")
    candidates = BlockDrafter(model).begin(request(target, SamplingParams(temperature=1.0), mode)).match(budget)
    assert len(candidates) == budget

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_fixed_tree(candidates.token_ids, candidates.parents, [("block-draft",)] * budget)
        return builder.build()

    step = exact_step(next_token, draft, mode)
    assert step.expected_accepted > 0.05
    assert step.total_variation(next_token) < EXACT


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("fixed", [(), (1,), (2, 0)])
@pytest.mark.parametrize("head", [(0, 1, 2), (0, 2)], ids=["whole head", "one token is missing"])
def test_a_chain_of_samples_is_exact(mode: str, fixed: tuple[int, ...], head: tuple[int, ...]) -> None:
    """Alone and beside cached siblings, which are excluded from what is sampled."""
    target, model = pair("chain", head)

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        for token in fixed:
            builder.add_fixed(ROOT, token, "recall")
        session = BlockDrafter(model).begin(request(target, SamplingParams(temperature=1.0), mode))
        assert isinstance(session, DrawSession)
        session.draw(builder, 2, rng)
        return builder.build()

    step = exact_step(next_token, draft, mode)
    assert step.num_trees > 1
    assert step.total_variation(next_token) < EXACT


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=2, repetition_penalty=1.5),
        SamplingParams(temperature=0.9, frequency_penalty=1.1, logit_bias={2: 0.8}),
    ],
    ids=["temperature", "top-k and penalty", "penalty of the answer and a bias"],
)
def test_chains_report_the_distribution_they_sample(sampling: SamplingParams) -> None:
    """Under the request's own settings and constraints, with the Markov term of the token sampled before."""
    target, model = pair("chain")

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        builder.add_fixed(ROOT, 1, "recall")
        session = BlockDrafter(model).begin(request(target, sampling, "traversal"))
        assert isinstance(session, DrawSession)
        session.draw(builder, 2, rng)

    check_draft_distribution(drawing)


def test_chains_follow_their_own_tokens() -> None:
    """Each token is sampled behind the Markov term of the one before it, the last committed one first."""
    target, model = pair("chain")
    asked = request(target, SamplingParams(temperature=1.0), "traversal")
    session, builder = BlockDrafter(model).begin(asked), TreeBuilder()
    assert isinstance(session, DrawSession)
    session.draw(builder, 2, CounterRng(3, 0))
    assert asked.target_slot is not None
    (block,) = model.fill([(model.place_beside(asked.target_slot, len(PROMPT)), PROMPT[-1])])
    before, found = PROMPT[-1], []
    for candidate, token, logits in zip(builder.build().candidates, builder.token_ids, block.logits, strict=True):
        assert isinstance(candidate.distribution, Sampled)
        torch.testing.assert_close(candidate.distribution.row, (logits + model.links(before)).softmax(-1))
        found.append(token)
        before = token
    assert len(found) == 2
