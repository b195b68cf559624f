"""An EAGLE head leaves the distribution of its target as it is: every branch of a step, enumerated.

Its vocabulary lacks a token of the target's, which then has probability 0 in what it samples from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from helpers.enumeration import exact_step
from helpers.hybrids import prefilled
from helpers.published_heads import SPECULATORS, eagle_pair, random_weights, small_target, write_head
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams
from precedent.drafters.request import Request
from precedent.sampling.constraints import constraints_for
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.testing.draft_distribution import check_draft_distribution
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_drafts.head import HeadDrafter, HeadModel

PROMPT = [1, 2, 1, 3]
EXACT = 1e-12

COVERED = (0, 2, 3)
TOY = {"vocab_size": 4, "num_hidden_layers": 3, "scale": 0.3, "seed": 4}


@cache
def pair() -> tuple[TargetModel, HeadModel]:
    """A target of four tokens, and a head for three of them."""
    layers = SPECULATORS["transformer_layer_config"] | {"vocab_size": 4}
    config = SPECULATORS | {"transformer_layer_config": layers, "draft_vocab_size": 3}
    return eagle_pair(write_head(Path(mkdtemp()) / "head", config, random_weights(config, COVERED)), **TOY)


@cache
def plain() -> PreTrainedModel:
    return small_target(**TOY)


@cache
def next_token(after: tuple[int, ...]) -> Tensor:
    """The target's own distribution behind the prompt and these tokens."""
    with torch.inference_mode():
        logits: Tensor = plain()(torch.tensor([[*PROMPT, *after]])).logits[0, -1]
        return logits.softmax(-1)


def request(sampling: SamplingParams, mode: str) -> Request:
    slot, shape = prefilled(pair()[0], PROMPT), constraints_for(sampling, PROMPT)
    return Request("r", tuple(PROMPT), sampling, mode=mode, shape=shape, target_slot=lambda: slot)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("fixed", [(), (1,), (2, 0)])
@pytest.mark.parametrize("runners_up", [0, 1])
def test_a_chain_of_samples_is_exact(mode: str, fixed: tuple[int, ...], runners_up: int) -> None:
    """Alone, beside cached siblings, which are excluded from what is sampled, and with a second sample."""
    _, head = pair()

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        for token in fixed:
            builder.add_fixed(ROOT, token, "recall")
        session = HeadDrafter("eagle", head).begin(request(SamplingParams(temperature=1.0), mode))
        session.draw(builder, 2, rng)
        if runners_up:
            session.draw_runners_up(builder, runners_up, rng)
        return builder.build()

    step = exact_step(next_token, draft, mode)
    assert step.num_trees > 1
    assert step.total_variation(next_token) < EXACT


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=2, repetition_penalty=1.5),
        SamplingParams(temperature=0.9, frequency_penalty=1.1, logit_bias={2: 0.8, 1: 3}),
    ],
    ids=["temperature", "top-k and penalty", "penalty of the answer and biases"],
)
def test_chains_report_the_distribution_they_sample(sampling: SamplingParams) -> None:
    """Under the request's own settings and constraints; the token that the head lacks is never sampled."""
    _, head = pair()

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        builder.add_fixed(ROOT, 3, "recall")
        HeadDrafter("eagle", head).begin(request(sampling, "traversal")).draw(builder, 2, rng)
        assert 1 not in builder.token_ids

    check_draft_distribution(drawing)
