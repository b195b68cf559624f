"""Several requests draw in step: what each would have sampled alone, in as many forwards as the longest chain has."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.beside import NOTHING
from precedent.decoding.loop import step
from precedent.decoding.proposal import Proposal, draw, plan
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Candidates, Draw, DrawSession
from precedent.drafters.model import in_step
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.model.in_step import Drawing
from precedent.drafters.request import Request
from precedent.errors import PrecedentError
from precedent.planning.costs import CostCurve
from precedent.planning.draw_gate import DrawGate
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import Planner
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng, Rng, entropy_rng
from precedent.target import Slot, TargetModel
from precedent.testing.replay_rng import enumerate_outcomes
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Sampled, TreeBuilder, chain

TINY = {"vocab_size": 24, "num_hidden_layers": 2, "hidden_size": 16}
PROMPTS = ([3, 1, 4], [5] * 60, [9, 2, 6, 5, 3, 5])
"""The second one is prefilled in a forward of its own, the others ride along with their first draw."""


class Watched(TargetModel):
    """Notes how many requests each forward had; fails where a prompt begins with `guilty`."""

    def __init__(self, seed: int) -> None:
        super().__init__(tiny_causal_lm("llama", seed=seed, **TINY))
        self.batches: list[int] = []
        self.guilty: int | None = None

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """Note the batch, or fail as a whole: a forward does not say whose fault it was."""
        self.batches.append(len(batch))
        scored = super().score(batch)
        if any(([*slot.token_ids, slot.pending])[0] == self.guilty for slot, _ in batch):
            raise MemoryError("no memory left")
        return scored


def small_target() -> TargetModel:
    return TargetModel(tiny_causal_lm("llama", seed=1, **TINY))


def sessions(drafter: DraftModelDrafter, mode: str) -> list[DrawSession]:
    sampling = SamplingParams() if mode == "greedy" else SamplingParams(temperature=0.9)
    return [drafter.begin(Request(str(i), tuple(p), sampling, mode=mode)) for i, p in enumerate(PROMPTS)]


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


class AlwaysDraws(Planner):
    """As many draws as it is told, in every step."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(CostCurve())
        self.observed: list[tuple[int, float]] = []
        self.together: set[int] = set()
        self._numbers = itertools.cycle(numbers)

    def plan(self, candidates: Sequence[Candidates], draw_sources: object, limits: Limits) -> Plan:
        """No fixed candidates."""
        return Plan(draws={"draft-model": min(next(self._numbers), limits.max_depth)})

    def observe_draws(self, source: str, num_draws: int, behind: int, milliseconds: float, together: int = 1) -> None:
        """Note what the draws of a sequence took, and beside how many."""
        self.observed.append((num_draws, milliseconds))
        self.together.add(together)


def sequences(target: TargetModel, drafter: DraftModelDrafter, sampling: SamplingParams) -> list[DecodingSequence]:
    found = []
    for number, prompt in enumerate(PROMPTS):
        slot = target.new_slot()
        target.prefill(slot, prompt)
        mode = "greedy" if sampling.greedy else "traversal"
        request = Request(str(number), tuple(prompt), sampling, mode=mode)
        drafting = {"draft-model": drafter.begin(request)}
        found.append(DecodingSequence(request, slot, 12, entropy_rng(number), sessions=drafting))
    return found


def drafted(running: Sequence[DecodingSequence], planner: Planner) -> list[Proposal]:
    """The proposals of a step, drawn."""
    proposals = plan(running, planner, NOTHING)
    draw(proposals, planner, NOTHING)
    return proposals


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


def test_greedy_texts_beside_others_are_plain_decodings() -> None:
    target = small_target()
    running = sequences(target, DraftModelDrafter(Watched(31)), SamplingParams())
    planner = AlwaysDraws([2, 3, 1, 4, 0])
    while left := [each for each in running if not each.finished]:
        step(left, target, planner)
    for each, prompt in zip(running, PROMPTS, strict=True):
        text = list(prompt)
        with torch.inference_mode():
            for _ in range(12):
                text.append(int(target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        assert each.output_ids == text[len(prompt) :]


def test_a_request_whose_drawing_fails_fails_alone() -> None:
    """The forward over all three fails, then each has its own; the others draw on."""
    draft = Watched(31)
    draft.guilty = PROMPTS[2][0]
    target, planner = small_target(), AlwaysDraws([2])
    running = sequences(target, DraftModelDrafter(draft), SamplingParams())
    proposals = drafted(running, planner)
    assert draft.batches == [3, 1, 1, 1, 2]
    assert [len(each.tree) for each in proposals] == [2, 2, 0]
    assert isinstance(running[2].error, PrecedentError)
    assert [each.error for each in running[:2]] == [None, None]
    assert len(planner.observed) == 2


class NoRng(CounterRng):
    """Random numbers that are not to be had."""

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """Raise."""
        raise RuntimeError("no random numbers left")


def test_an_exception_between_two_forwards_is_the_drawings_own() -> None:
    model = Watched(31)
    first, second, _ = sessions(DraftModelDrafter(model), "traversal")
    builder = TreeBuilder()
    broken, whole = Draw(first, TreeBuilder(), 2, NoRng(0, 0)), Draw(second, builder, 2, CounterRng(0, 0))
    first.draw_together([broken, whole])
    assert isinstance(broken.error, RuntimeError)
    assert whole.error is None
    assert len(builder) == 2
    assert model.batches == [2, 1]


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


class Broken(DrawSession):
    """Of a drafter that fails as a whole, when it draws for several."""

    group, behind = "broken", 0

    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        """Never asked."""

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Fail for nobody in particular."""
        raise RuntimeError("the drafter is broken")

    def committed(self, token_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def end(self) -> None:
        """Nothing is held."""


def test_a_drafter_that_fails_as_a_whole_fails_its_own_requests() -> None:
    """Those that draw elsewhere go on."""
    drafter = DraftModelDrafter(Watched(31))
    running = sequences(small_target(), drafter, SamplingParams())
    for each in running[:2]:
        each.sessions["draft-model"] = Broken()
    proposals = drafted(running, AlwaysDraws([2]))
    assert [len(each.tree) for each in proposals] == [0, 0, 2]
    assert [each.error is None for each in running] == [False, False, True]


def test_a_distribution_wider_than_the_targets_rows_is_refused_by_name() -> None:
    """A drafter that does not cut its rows where the tokenizer ends, and one that samples an id beyond it."""
    running = sequences(small_target(), DraftModelDrafter(Watched(31)), SamplingParams(temperature=1.0))
    for each in running[:2]:
        each.request = replace(each.request, num_tokens=20)  # its drafter was told of none
    proposals = drafted(running, AlwaysDraws([2]))
    assert "from a distribution of 24 tokens, and the target chooses among 20" in str(running[0].error)
    assert [len(each.tree) for each in proposals] == [0, 0, 2]
    assert running[2].error is None


def test_what_drawing_costs_is_kept_apart_by_how_many_draw_together() -> None:
    gate = DrawGate()
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
            step(left, target, AlwaysDraws([1]))
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
