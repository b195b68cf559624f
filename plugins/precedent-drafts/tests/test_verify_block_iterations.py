"""Block drafts that fill a block in several forwards (SpecDiff, 2408.05636), and those that read no target: exact."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.enumeration import exact_step
from helpers.hybrids import prefilled
from helpers.tiny_block import tiny_block_draft
from torch import Tensor

from precedent.config import SamplingParams
from precedent.drafters.base import DrawSession
from precedent.drafters.request import Request
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.testing.draft_distribution import check_draft_distribution
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_drafts.block_drafter import BlockDrafter
from precedent_drafts.block_model import BlockModel

PROMPT = [1, 2, 1, 0]
WAYS = pytest.mark.parametrize(("iterations", "condition"), [(2, "target"), (3, "target"), (1, "none"), (2, "none")])


@cache
def pair(**changes: Any) -> tuple[TargetModel, BlockModel]:
    """A target of three tokens, and a draft with strong opinions of its own."""
    target = TargetModel(tiny_causal_lm(vocab_size=3, hidden_size=16, num_hidden_layers=3, scale=0.3, seed=4))
    return target, BlockModel(tiny_block_draft(target.model, (0, 1, 2), block_size=3, head_dim=4, **changes), target)


def request(target: TargetModel) -> Request:
    slot, sampling = prefilled(target, PROMPT), SamplingParams(temperature=1.0)
    return Request("r", tuple(PROMPT), sampling, mode="traversal", target_slot=lambda: slot)


@cache
def next_token(after: tuple[int, ...]) -> Tensor:
    """The target's own distribution behind the prompt and these tokens."""
    with torch.inference_mode():
        return pair()[0].model(torch.tensor([[*PROMPT, *after]])).logits[0, -1].softmax(-1)


@WAYS
def test_a_tree_of_candidates_is_exact(iterations: int, condition: str) -> None:
    """Candidates are proposals with estimates, whatever forward they come from."""
    target, model = pair(iterations=iterations, condition=condition)
    candidates = BlockDrafter(model).begin(request(target)).match(6)
    assert len(candidates) == 6
    assert all(0.0 < estimate <= 1.0 for estimate in candidates.estimates)

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_fixed_tree(candidates.token_ids, candidates.parents, [("block-draft",)] * 6)
        return builder.build()

    step = exact_step(next_token, draft, "traversal")
    assert step.expected_accepted > 0.05
    assert step.total_variation(next_token) < 1e-12


@WAYS
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_a_chain_of_samples_is_exact(mode: str, iterations: int, condition: str) -> None:
    """What later forwards are given depends on the text alone, so no sample's distribution sees other samples."""
    target, model = pair(iterations=iterations, condition=condition, proposes="chain")

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        builder.add_fixed(ROOT, 1, "recall")
        session = BlockDrafter(model).begin(request(target))
        assert isinstance(session, DrawSession)
        session.draw(builder, 2, rng)

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        drawing(builder, rng)
        return builder.build()

    check_draft_distribution(drawing)
    step = exact_step(next_token, draft, mode)
    assert step.num_trees > 1
    assert step.total_variation(next_token) < 1e-12


def test_forwards_unmask_an_equal_share_each() -> None:
    """Of eight positions in four forwards two more are known before each; the surest come first, and stay."""
    target = TargetModel(tiny_causal_lm(scale=1.5))
    model = BlockModel(tiny_block_draft(target.model, block_size=8, iterations=4), target)
    seen, run = list[list[int]](), model._forward

    def watched(places: Any, tokens: list[list[int]]) -> Any:
        seen.append(list(tokens[0]))
        return run(places, tokens)

    model._forward = watched  # type: ignore[method-assign]
    slot = prefilled(target, PROMPT)
    model.fill([(model.place_beside(lambda: slot, len(PROMPT)), PROMPT[-1])])
    mask = model.draft.inputs.mask_id
    assert [sum(token != mask for token in row[1:]) for row in seen] == [0, 2, 4, 6]
    for before, after in pairwise(seen):
        assert all(old in (mask, new) for old, new in zip(before, after, strict=True))
