"""No draft changes the distribution of its target: every branch of a step is enumerated, drafting included.

EAGLE heads, conditioned drafts and block drafts (in one forward or in several, SpecDiff, 2408.05636), with heads that
cover all tokens or lack one, which then has probability 0 in what is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.enumeration import check_drawn_step, exact_step
from helpers.hybrids import prefilled
from helpers.published_heads import SPECULATORS, eagle_pair, random_weights, write_head
from helpers.tiny_block import tiny_block_draft
from torch import Tensor

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter, DrawSession
from precedent.drafters.request import Request
from precedent.sampling.constraints import constraints_for
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_drafts.block_drafter import BlockDrafter, BlockModel
from precedent_drafts.heads import HeadDrafter, reading_hidden_states
from precedent_drafts.trained import TOKEN_GUIDED
from precedent_testing.draft_distribution import check_draft_distribution
from precedent_testing.tiny_models import tiny_causal_lm

PROMPT = [1, 2, 1, 0]
TOY = {"num_hidden_layers": 3, "scale": 0.3, "seed": 4}
SAMPLED = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class Way:
    """A target of few tokens and a drafter with strong opinions of its own, whose head may `lack` a token."""

    target: TargetModel
    drafter: Drafter
    lacks: int | None = None

    def request(self, sampling: SamplingParams = SAMPLED, mode: str = "traversal") -> Request:
        slot, shape = prefilled(self.target, PROMPT), constraints_for(sampling, PROMPT)
        return Request("r", tuple(PROMPT), sampling, mode=mode, shape=shape, target_slot=lambda: slot)

    def draw(self, builder: TreeBuilder, rng: Rng, sampling: SamplingParams = SAMPLED, mode: str = "traversal") -> Any:
        session = self.drafter.begin(self.request(sampling, mode))
        assert isinstance(session, DrawSession)
        session.draw(builder, 2, rng)
        assert self.lacks is None or self.lacks not in [
            token
            for token, each in zip(builder.token_ids, builder.build().sources, strict=True)
            if "recall" not in each
        ]
        return session


def small() -> Any:
    return tiny_causal_lm(vocab_size=3, hidden_size=16, **TOY)


@cache
def way(name: str) -> Way:
    if name == "EAGLE":
        layers = SPECULATORS["transformer_layer_config"] | {"vocab_size": 4}
        config = SPECULATORS | {"transformer_layer_config": layers, "draft_vocab_size": 3}
        folder = write_head(Path(mkdtemp()) / "head", config, random_weights(config, (0, 2, 3)))
        target, head = eagle_pair(folder, vocab_size=4, **TOY)
        return Way(target, HeadDrafter("eagle", head), lacks=1)
    if name.startswith("conditioned"):
        ids, model = (0, 2) if "lacks" in name else range(3), small()
        draft = random_conditioned(model, (2,), TOKEN_GUIDED, opinionated_weights(model, 2, TOKEN_GUIDED, ids))
        target = TargetModel(model)
        drafter = HeadDrafter("draft-model", reading_hidden_states(draft, target, feeds_back_normed=True))
        return Way(target, drafter, lacks=1 if "lacks" in name else None)
    target = TargetModel(small())
    draft = tiny_block_draft(target.model, (0, 1, 2), **{"block_size": 3, "head_dim": 4} | TREES[name])
    return Way(target, BlockDrafter(BlockModel(draft, target)))


TREES: dict[str, dict[str, Any]] = {
    "block": {"block_size": 2},
    "block in two forwards": {"iterations": 2},
    "block in three forwards": {"iterations": 3},
    "block without condition": {"condition": "none"},
    "block without condition in two forwards": {"condition": "none", "iterations": 2},
}
SAMPLING = ("EAGLE", "conditioned", "conditioned, lacks a token")


@cache
def next_token(name: str, after: tuple[int, ...]) -> Tensor:
    """The target's own distribution behind the prompt and these tokens."""
    with torch.inference_mode():
        logits: Tensor = way(name).target.model(torch.tensor([[*PROMPT, *after]])).logits[0, -1]
        return logits.softmax(-1)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("budget", [1, 3, 6])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_of_candidates_is_exact(name: str, budget: int, mode: str) -> None:
    """Whatever the estimates are, and whatever forward they come from; and it is accepted now and then."""
    candidates = way(name).drafter.begin(way(name).request(mode=mode)).match(budget)
    assert len(candidates) == budget
    assert all(0.0 < estimate <= 1.0 for estimate in candidates.estimates)

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_fixed_tree(candidates.token_ids, candidates.parents, [("block-draft",)] * budget)
        return builder.build()

    step = exact_step(lambda after: next_token(name, after), draft, mode)
    assert step.expected_accepted > 0.05
    assert step.total_variation(lambda after: next_token(name, after)) < 1e-12


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("fixed", [(), (1,), (2, 0)])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_chain_of_samples_is_exact(name: str, fixed: tuple[int, ...], mode: str) -> None:
    """Alone and beside cached siblings, which are excluded from what is sampled."""

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        for token in fixed:
            builder.add_fixed(ROOT, token, "recall")
        way(name).draw(builder, rng, mode=mode)

    check_drawn_step(lambda after: next_token(name, after), drawing, mode)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("fixed", [(), (1,), (2, 0)])
def test_a_chain_with_a_second_sample_is_exact(fixed: tuple[int, ...], mode: str) -> None:
    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        for token in fixed:
            builder.add_fixed(ROOT, token, "recall")
        way("EAGLE").draw(builder, rng, mode=mode).draw_runners_up(builder, 1, rng)

    check_drawn_step(lambda after: next_token("EAGLE", after), drawing, mode)


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        SamplingParams(temperature=0.6, top_k=2, repetition_penalty=1.5),
        SamplingParams(temperature=0.9, frequency_penalty=1.1, logit_bias={2: 0.8, 1: 3}),
    ],
    ids=["temperature", "top-k and penalty", "penalty of the answer and biases"],
)
@pytest.mark.parametrize("name", SAMPLING)
def test_chains_report_the_distribution_they_sample(name: str, sampling: SamplingParams) -> None:
    """Under the request's own settings and constraints; a token that the head lacks is never sampled."""

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        builder.add_fixed(ROOT, 2, "recall")
        way(name).draw(builder, rng, sampling)

    check_draft_distribution(drawing)
