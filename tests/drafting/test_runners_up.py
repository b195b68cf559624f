"""A second token beside each sample: the distribution stays the target's, texts are plain decoding's, rows must pay."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.enumeration import RngOfAStep
from helpers.random_trees import toy_model
from helpers.stepping import AllCandidates, run, start
from helpers.tabled_model import TabledModel
from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters import Request
from precedent.drafters.base import DrawSource
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.planning.planner import Limits, Plan
from precedent.sampling.rng import CounterRng, Rng, entropy_rng
from precedent.target import TargetModel
from precedent.tree import ROOT, TreeBuilder
from precedent_testing.drafters import OracleDrafter
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import tiny_causal_lm
from precedent_testing.trees import check_tree

EXACT, VOCABULARY = 1e-12, 3
PROMPT = (5, 6, 7)


class TwoDraws(AllCandidates):
    """All fixed candidates, two samples and a second token beside each, whatever pays; notes what it is told."""

    def plan(self, candidates: Sequence[Any], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        self.told = {name: source.runners_up for name, source in draw_sources.items()}
        plan = super().plan(candidates, draw_sources, limits)
        plan.runners_up = {name: 2 for name, source in draw_sources.items() if source.runners_up}
        return plan


def toy(name: str) -> Any:
    """A random model of three tokens, behind a prompt of one."""
    distribution = toy_model(name, VOCABULARY, plain=True)
    return TabledModel(lambda token_ids: distribution(token_ids[1:]).log())


def tiny() -> TargetModel:
    return TargetModel(tiny_causal_lm("llama", seed=6))


def decode(
    target: Any,
    drafters: Sequence[Any],
    sampling: SamplingParams,
    mode: str,
    prompt: Sequence[int] = PROMPT,
    rng_of: Any = None,
) -> tuple[DecodingSequence, TwoDraws]:
    """A whole answer through the real loop, and its planner."""
    given, planner = {"prompt": prompt, "mode": mode, "ends": frozenset()}, TwoDraws(2)
    sequence = start(target, drafters, sampling, rng_of=rng_of or entropy_rng(3), **given)
    run(target, sequence, DecodeLoop(target, planner))
    return sequence, planner


@pytest.mark.parametrize("memory", [(), (1, 2), (0, 0)], ids=["alone", "beside a path", "beside another"])
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_whole_answers_have_the_targets_distribution_exactly(mode: str, memory: tuple[int, ...]) -> None:
    """All answers of two tokens, down every branch of all random numbers."""
    target, found = toy("target"), defaultdict[tuple[int, ...], float](float)
    sampling = SamplingParams(temperature=1.0, max_tokens=2)

    def answer(rng: Rng) -> tuple[int, ...]:
        drafters = [OracleDrafter(memory), DraftModelDrafter(toy("draft"))]
        done, _ = decode(target, drafters, sampling, mode, (0,), rng_of=lambda number: RngOfAStep(rng, number))
        return tuple(done.output_ids)

    with torch.inference_mode():
        for probability, output in enumerate_outcomes(answer):
            found[output] += probability
    model = toy_model("target", VOCABULARY, plain=True)
    expected = {(a, b): float(model(())[a] * model((a,))[b]) for a, b in itertools.product(range(VOCABULARY), repeat=2)}
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert 0.5 * sum(abs(found[string] - mass) for string, mass in expected.items()) < EXACT


def draw_tree(mode: str, number: int, cached: int | None = None) -> TreeBuilder:
    """Two samples and `number` runners-up of a tiny model, beside a cached token."""
    sampling = SamplingParams() if mode == "greedy" else SamplingParams(temperature=1.0)
    session = DraftModelDrafter(tiny()).begin(Request("test", PROMPT, sampling, mode=mode))
    builder = TreeBuilder()
    if cached is not None:
        builder.add_fixed(ROOT, cached, "memory")
    session.draw(builder, 2, CounterRng(1, 0))
    session.draw_runners_up(builder, number, CounterRng(1, 0))
    check_tree(builder.build())
    return builder


def test_a_greedy_runner_up_is_the_next_best_token_that_nobody_named() -> None:
    with torch.inference_mode():
        best, second, third = tiny().model(torch.tensor([PROMPT])).logits[0, -1].topk(3).indices.tolist()
    assert set(draw_tree("greedy", 0).children(ROOT)) == {best}
    assert set(draw_tree("greedy", 1).children(ROOT)) == {best, second}
    assert set(draw_tree("greedy", 1, cached=second).children(ROOT)) == {best, second, third}
    builder = draw_tree("greedy", 2)
    assert len(builder) == 4
    assert builder.runners_up == {2, 3}


def test_a_text_whose_second_guesses_are_right_needs_half_the_steps() -> None:
    """And it is plain decoding's, to the token: the draft's likeliest token is one that the target never says."""
    target, draft, sampling = tiny(), tiny(), SamplingParams(max_tokens=20)

    def wrong(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        return logits.scatter(-1, logits.argmin(-1, keepdim=True), logits.amax(-1, keepdim=True) + 1)

    draft.model.lm_head.register_forward_hook(wrong)
    with torch.inference_mode():
        (plain, _), (drafted, _) = (
            decode(target, drafters, sampling, "greedy") for drafters in ([], [DraftModelDrafter(draft)])
        )
    assert drafted.output_ids == plain.output_ids
    assert drafted.stats.num_steps == 10


@pytest.mark.parametrize(
    ("mode", "expected"), [("coupled", False), ("lossy_typical", False), ("traversal", True), ("topdown", True)]
)
def test_other_modes_get_none(mode: str, expected: bool) -> None:
    """Those choose by the seed's noise, or bend the distribution to the first sample's."""
    sampling = SamplingParams(temperature=1.0, seed=1 if mode == "coupled" else None, max_tokens=4)
    done, planner = decode(tiny(), [DraftModelDrafter(tiny())], sampling, mode)
    assert planner.told == {"draft-model": expected}
    assert done.stats.num_draft_tokens > 0
