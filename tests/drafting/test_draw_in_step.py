"""Several requests draw in step: what each would have sampled alone, in as many forwards as the longest chain has."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.drawing import PROMPTS, TINY, AlwaysDraws, Watched, drafted, sequences, sessions
from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Draw
from precedent.drafters.model import in_step
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.model.in_step import Drawing
from precedent.drafters.request import Request
from precedent.planning.gate import Gate
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng, Rng
from precedent.target import Slot, TargetModel
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Sampled, TreeBuilder, chain
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import tiny_causal_lm


def builder_with_a_fixed_candidate() -> TreeBuilder:
    builder = TreeBuilder()
    builder.add_fixed(ROOT, 7, "cache")
    return builder


@pytest.mark.parametrize("mode", ["greedy", "traversal"])
def test_each_request_samples_what_it_would_have_sampled_alone(mode: str) -> None:
    """Chains of different lengths, over several steps, distributions and excluded siblings included (float64)."""
    model = Watched(31)
    together, alone = (sessions(DraftModelDrafter(model), mode) for _ in range(2))
    for number, lengths in enumerate([(3, 1, 4), (2, 5, 2)]):
        rng = [CounterRng(i, number) for i in range(len(PROMPTS))]
        ours, theirs = ([builder_with_a_fixed_candidate() for _ in PROMPTS] for _ in range(2))
        model.batches.clear()
        draws = [Draw(*given) for given in zip(together, ours, lengths, rng, strict=True)]
        together[0].draw_together(draws)
        assert [each.error for each in draws] == [None] * 3
        assert all(each.seconds > 0 for each in draws)
        assert model.batches == [sum(length > place for length in lengths) for place in range(max(lengths))]
        for one, other, length, its_rng, mine, its in zip(together, alone, lengths, rng, ours, theirs, strict=True):
            other.draw(its, length, its_rng)
            assert_equal(mine.build(), its.build())
            assert len(mine) == 1 + length or mode == "greedy"
            one.committed([4, 8])
            other.committed([4, 8])


def assert_equal(one: CandidateTree, other: CandidateTree) -> None:
    assert (one.token_ids, one.parents, one.sources) == (other.token_ids, other.parents, other.sources)
    for mine, its in zip(one.candidates, other.candidates, strict=True):
        assert mine.child == its.child
        assert isinstance(mine.distribution, Sampled) == isinstance(its.distribution, Sampled)
        if isinstance(mine.distribution, Sampled) and isinstance(its.distribution, Sampled):
            assert mine.distribution.excluded == its.distribution.excluded
            torch.testing.assert_close(mine.distribution.row, its.distribution.row, rtol=0, atol=1e-12)


def test_a_step_of_three_requests_draws_in_as_many_forwards_as_its_longest_chain() -> None:
    draft, planner = Watched(31), AlwaysDraws([2, 3, 1])
    running = sequences(
        TargetModel(tiny_causal_lm("llama", seed=1, **TINY)), DraftModelDrafter(draft), SamplingParams()
    )
    proposals = drafted(running, planner)
    assert draft.batches == [3, 2, 1]
    assert [len(each.tree) for each in proposals] == [2, 3, 1]
    assert [number for number, _ in planner.observed] == [2, 3, 1]
    assert planner.together == {3}
    shares, seconds = [taken for _, taken in planner.observed], {each.stats.draft_model_seconds for each in running}
    assert 0 < sum(shares) <= 1e3 * min(seconds), "the planner learns shares, each request waited for all of them"


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.seconds, self.pending = 0.0, False

    def __call__(self) -> float:
        return self.seconds

    def read(self) -> None:
        """The first to read what a forward computes waits for all of it, as on a GPU."""
        self.seconds, self.pending = self.seconds + 5.0 * self.pending, False


def test_a_forward_that_is_waited_for_later_is_shared_by_all_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to read must not be charged all of it, nor the others nothing."""
    clock, model = Clock(), Watched(31)
    monkeypatch.setattr(in_step, "perf_counter", clock)

    def reading(slot: Slot, tree: CandidateTree) -> Drawing:
        clock.pending = True
        yield slot, tree
        clock.read()

    slots = [model.new_slot() for _ in range(3)]
    for slot in slots:
        model.prefill(slot, [1, 2, 3])
    trees = [EMPTY_TREE, EMPTY_TREE, chain([4, 5])]
    asking = [reading(slot, tree) for slot, tree in zip(slots, trees, strict=True)]
    ended = in_step.draw_in_step(model, asking, nullcontext)
    assert [each.seconds for each in ended] == pytest.approx([1.0, 1.0, 3.0])


def test_what_drawing_costs_is_kept_apart_by_how_many_draw_together() -> None:
    gate = Gate()
    for together, milliseconds in ((1, 4.0), (4, 1.0), (4, 1.2)):
        gate.observe(1, 0, milliseconds, together)
    costs = []
    for requests in (1, 3, 4, 9):
        gate.together = requests
        costs.append(gate.milliseconds(2))
    assert costs == [8.0, 8.0, 2.0, 2.0], "a request left alone does not expect the share that it had beside others"


class RngOf:
    """One request's random numbers in one step, out of a script that is shared by all."""

    def __init__(self, rng: Rng, request: int, step: int) -> None:
        self._rng, self._name = rng, f" {request} {step}"

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """The script's."""
        return self._rng.bernoulli(probability, node, purpose + self._name)

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """The script's."""
        return self._rng.categorical(weights, node, purpose + self._name)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_two_answers_drafted_in_step_have_the_product_of_the_targets_distributions(mode: str) -> None:
    """Every branch of the real loop over two requests, two tokens each (tiny transformers): to 1e-9."""
    tiny = {"vocab_size": 3, "num_hidden_layers": 1, "hidden_size": 16, "scale": 0.3}
    target, draft = (TargetModel(tiny_causal_lm("llama", seed=seed, **tiny)) for seed in (8, 9))
    sampling, prompts = SamplingParams(temperature=1.0, max_tokens=2), ([1, 2], [2, 0, 1])

    def answers(rng: Rng) -> tuple[tuple[int, ...], ...]:
        drafter, running = DraftModelDrafter(draft), []
        for number, prompt in enumerate(prompts):
            slot = target.new_slot()
            target.prefill(slot, prompt)
            request = Request(str(number), tuple(prompt), sampling, mode=mode)
            rng_of, drafting = partial(RngOf, rng, number), {"draft-model": drafter.begin(request)}
            running.append(DecodingSequence(request, slot, 2, rng_of, sessions=drafting))
        while left := [each for each in running if not each.finished]:
            DecodeLoop(target, AlwaysDraws([1])).step(left)
        assert all(each.error is None for each in running)
        return tuple(tuple(each.output_ids) for each in running)

    found: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for probability, texts in enumerate_outcomes(answers):
        found[texts] += probability
    expected = {
        (one, other): plain(target, prompts[0], one) * plain(target, prompts[1], other)
        for one in itertools.product(range(3), repeat=2)
        for other in itertools.product(range(3), repeat=2)
    }
    assert found == pytest.approx(expected, abs=1e-9)


def plain(target: TargetModel, prompt: list[int], text: Sequence[int]) -> float:
    """The probability that plain sampling gives to a text."""
    probability = 1.0
    for place, token in enumerate(text):
        with torch.inference_mode():
            row = target.model(input_ids=torch.tensor([[*prompt, *text[:place]]]), use_cache=False).logits[0, -1]
        probability *= float(probs_of(row, SamplingParams(temperature=1.0))[token])
    return probability
