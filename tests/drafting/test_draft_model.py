"""The draft model as a drafter: its KV cache, what it samples, several requests in step, and early exits."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.hybrids import prefilled
from helpers.random_trees import toy_model
from helpers.stepping import start
from helpers.tabled_model import TabledModel
from helpers.tiny_architectures import settings_of
from torch import Tensor

from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.aids import Aids
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal, draw, plan
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters import Candidates, DrawSession, Request
from precedent.drafters.base import Draw
from precedent.drafters.model.distribution import sample_beside, sample_with_one_read
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.engine.engine import Engine
from precedent.errors import GenerationError
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Limits, Plan, Planner
from precedent.sampling.rng import CounterRng, Rng, entropy_rng
from precedent.target import Slot, TargetModel
from precedent.target.load.first_layers import exits_early, first_layers
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder, chain
from precedent_cuda.host_waits import HostWaits
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent_testing.trees import check_tree

TINY = {"vocab_size": 24, "num_hidden_layers": 2, "hidden_size": 16}
PROMPTS = ([3, 1, 4], [5] * 60, [9, 2, 6, 5, 3, 5])
"""The second one is prefilled in a forward of its own, the others ride along with their first draw."""


def tiny(seed: int = 31) -> TargetModel:
    return TargetModel(tiny_causal_lm("llama", seed=seed, **TINY))


def beginning(model: TargetModel, prompt: Sequence[int], sampling: SamplingParams, mode: str) -> DrawSession:
    """A draft model at work on a prompt."""
    session = DraftModelDrafter(model).begin(Request("r", tuple(prompt), sampling, mode=mode))
    assert isinstance(session, DrawSession)
    return session


def test_a_row_that_holds_nan_is_not_drawn_from() -> None:
    with pytest.raises(GenerationError, match="hold NaN"):
        sample_beside(torch.full((5,), torch.nan), (1,), CounterRng(0, 0), 0, "draft")


def turn(drafter: DraftModelDrafter, prompt: list[int], tenant: str) -> tuple[int, list[int]]:
    """How much of a prompt is not known at the beginning, and what is drawn then; the request ends afterwards."""
    session, builder = drafter.begin(Request("r", tuple(prompt), SamplingParams(), tenant)), TreeBuilder()
    behind = session.behind
    session.draw(builder, 4, CounterRng(0, 0))
    session.end()
    session.end()
    return behind, list(builder.build().token_ids)


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended() -> None:
    """What was drafted and never said is forgotten; another tenant's turn computes everything itself."""
    model, choose = tiny(), random.Random(2)
    first = [choose.randrange(1, 16) for _ in range(60)]
    later, resembling = [*first, 3, 1, 4], [*first[:40], 9, 9, 9]
    drafter, alone = DraftModelDrafter(model), [turn(DraftModelDrafter(model), p, "a")[1] for p in (later, resembling)]
    assert turn(drafter, first, "shop")[0] == len(first)
    assert turn(drafter, later, "bank") == (len(later), alone[0])
    assert turn(drafter, later, "shop") == (len(later) - len(first), alone[0])
    assert turn(drafter, resembling, "shop") == (3, alone[1])
    drafter.close()
    assert turn(drafter, later, "shop") == (len(later), alone[0])


# Several requests in step


class Watched(TargetModel):
    """Notes how many requests each forward had; fails where a prompt begins with `guilty`."""

    def __init__(self) -> None:
        super().__init__(tiny_causal_lm("llama", seed=31, **TINY))
        self.batches: list[int] = []
        self.guilty: int | None = None

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """Note the batch, or fail as a whole: a forward does not say whose fault it was."""
        self.batches.append(len(batch))
        scored = super().score(batch)
        if any(([*slot.token_ids, slot.pending])[0] == self.guilty for slot, _ in batch):
            raise MemoryError("no memory left")
        return scored


class AlwaysDraws(Planner):
    """As many draws as it is told, in every step."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(CostCurve())
        self.observed: list[tuple[int, float]] = []
        self.together: set[int] = set()
        self._numbers = itertools.cycle(numbers)

    def plan(self, candidates: Sequence[Candidates], draw_sources: object, limits: Limits) -> Plan:
        return Plan(draws={"draft-model": min(next(self._numbers), limits.max_depth)})

    def observe_draws(self, source: str, num_draws: int, behind: int, milliseconds: float, together: int = 1) -> None:
        self.observed.append((num_draws, milliseconds))
        self.together.add(together)


def sequences(draft: TargetModel, sampling: SamplingParams | None = None) -> list[DecodingSequence]:
    target, drafter, found = tiny(seed=1), DraftModelDrafter(draft), []
    sampling = sampling or SamplingParams()
    for number, prompt in enumerate(PROMPTS):
        request = Request(str(number), tuple(prompt), sampling, mode="greedy" if sampling.greedy else "traversal")
        drafting: dict[str, Any] = {"draft-model": drafter.begin(request)}
        slot = prefilled(target, prompt)
        found.append(DecodingSequence(request, slot, 12, entropy_rng(number), sessions=drafting))
    return found


def drafted(running: Sequence[DecodingSequence], planner: Planner) -> list[Proposal]:
    """The proposals of a step, drawn."""
    proposals = plan(running, aids := Aids(planner))
    draw(proposals, aids)
    return proposals


def test_a_step_of_three_requests_draws_in_as_many_forwards_as_its_longest_chain() -> None:
    draft, planner = Watched(), AlwaysDraws([2, 3, 1])
    running = sequences(draft)
    proposals = drafted(running, planner)
    assert draft.batches == [3, 2, 1]
    assert [len(each.tree) for each in proposals] == [2, 3, 1]
    assert [number for number, _ in planner.observed] == [2, 3, 1]
    assert planner.together == {3}
    shares, seconds = [taken for _, taken in planner.observed], {each.stats.draft_model_seconds for each in running}
    assert 0 < sum(shares) <= 1e3 * min(seconds), "the planner learns shares, each request waited for all of them"


class NoRng(CounterRng):
    """Random numbers that are not to be had."""

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        raise RuntimeError("no random numbers left")


def test_a_request_whose_drawing_fails_fails_alone() -> None:
    """The forward over all three fails, then each has its own; the others draw on. So between two forwards."""
    draft, planner = Watched(), AlwaysDraws([2])
    draft.guilty = PROMPTS[2][0]
    running = sequences(draft)
    proposals = drafted(running, planner)
    assert draft.batches == [3, 1, 1, 1, 2]
    assert [len(each.tree) for each in proposals] == [2, 2, 0]
    assert [each.error for each in running] == [None] * 3
    assert [list(each.sessions) for each in running] == [["draft-model"], ["draft-model"], []]
    assert len(planner.observed) == 2
    drafter, sampling = DraftModelDrafter(tiny()), SamplingParams(temperature=0.9)
    first, second = (drafter.begin(Request("r", tuple(p), sampling, mode="traversal")) for p in PROMPTS[:2])
    broken, whole = Draw(first, TreeBuilder(), 2, NoRng(0, 0)), Draw(second, TreeBuilder(), 2, CounterRng(0, 0))
    first.draw_together([broken, whole])
    assert isinstance(broken.error, RuntimeError)
    assert whole.error is None
    assert len(whole.builder) == 2


class RngOf:
    """One request's random numbers in one step, out of a script that is shared by all."""

    def __init__(self, rng: Rng, request: int, step: int) -> None:
        self._rng, self._name = rng, f" {request} {step}"

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        return self._rng.bernoulli(probability, node, purpose + self._name)

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        return self._rng.categorical(weights, node, purpose + self._name)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_two_answers_drafted_in_step_have_the_product_of_the_targets_distributions(mode: str) -> None:
    """Every branch of the real loop over two requests, two tokens each: to 1e-9."""
    row_of, draft_row_of = (toy_model(name, 3, plain=True) for name in ("target", "draft"))
    target, draft = (TabledModel(lambda token_ids, of=of: of(token_ids).log()) for of in (row_of, draft_row_of))
    sampling, prompts = SamplingParams(temperature=1.0, max_tokens=2), ((1, 2), (2, 0, 1))

    def answers(rng: Rng) -> tuple[tuple[int, ...], ...]:
        drafters, given = [DraftModelDrafter(draft)], {"mode": mode, "ends": frozenset()}
        running = [
            start(target, drafters, sampling, prompt=prompt, rng_of=partial(RngOf, rng, number), **given)
            for number, prompt in enumerate(prompts)
        ]
        while left := [each for each in running if not each.finished]:
            DecodeLoop(target, AlwaysDraws([1])).step(left)
        assert all(each.error is None for each in running)
        return tuple(tuple(each.output_ids) for each in running)

    found: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    with torch.inference_mode():
        for probability, texts in enumerate_outcomes(answers):
            found[texts] += probability
    plain = [
        {text: float(row_of(prompt)[text[0]] * row_of((*prompt, text[0]))[text[1]]) for text in pairs}
        for prompt, pairs in zip(prompts, [list(itertools.product(range(3), repeat=2))] * 2, strict=True)
    ]
    expected = {(a, b): plain[0][a] * plain[1][b] for a, b in itertools.product(*plain)}
    assert found == pytest.approx(expected, abs=1e-9)


# Early exits


def on(slot: Slot, sampling: SamplingParams | None = None) -> Request:
    return Request("r", (*slot.token_ids, slot.pending), sampling or SamplingParams(), target_slot=lambda: slot)


def drawn(drafter: DraftModelDrafter, request: Request, num_draws: int = 4) -> list[int]:
    builder = TreeBuilder()
    drafter.begin(request).draw(builder, num_draws, CounterRng(3, 0))
    return list(builder.token_ids)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "stablelm"])
def test_an_exit_drafts_what_the_same_layers_draft_on_a_cache_of_their_own(architecture: str) -> None:
    """Sharing the target's keys and values saves the prefill and changes nothing, neither here nor for the target."""
    model = tiny_causal_lm(architecture, **settings_of(architecture))
    target, draft, tree = TargetModel(model), TargetModel(first_layers(model, 1)), chain([7, 8, 9])
    for length in (9, 255):  # 256 rows are a buffer's first size
        prompt = [token % 200 for token in range(length)]
        expected = target.score([(prefilled(target, prompt), tree)])[0]
        slot = prefilled(target, prompt)
        found = drawn(DraftModelDrafter(draft, early_exit=True), on(slot), 6)
        assert found == drawn(DraftModelDrafter(draft), on(slot), 6)
        assert slot.kv.length == length - 1
        assert torch.equal(target.score([(slot, tree)])[0], expected)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(max_tokens=24), SamplingParams(temperature=0.9, seed=4, max_tokens=24)]
)
def test_an_engine_shares_the_cache_and_answers_as_plain_decoding(sampling: SamplingParams) -> None:
    """The engine notices that the draft is the target's own, sets nothing aside for it, and the text stays."""
    model = tiny_causal_lm(scale=2.0)
    texts, reserved = [], []
    for draft in (None, first_layers(model, 2)):
        engine = Engine(model, byte_tokenizer(), name="tiny", draft_model=draft, cost=CostCurve())
        speculation = SpeculationConfig(drafters=("draft-model",))
        reserved.append(engine._kv_bytes(50, 24, speculation, engine._drafters_named(("draft-model",))))
        result = engine.submit(list(range(40, 90)), sampling, speculation=speculation).result()
        texts.append(result.token_ids)
        engine.close()
    assert texts[0] == texts[1]
    assert result.stats.drafted_by_source["draft-model"] > 0
    assert reserved[0] == reserved[1]


def test_only_the_targets_own_first_layers_share() -> None:
    """Equal weights are not enough, nor are later layers or more of them."""
    model = tiny_causal_lm()
    target = TargetModel(model)
    assert exits_early(TargetModel(first_layers(model, 2)), target)
    assert not exits_early(TargetModel(tiny_causal_lm(num_hidden_layers=2)), target)
    assert not exits_early(TargetModel(tiny_causal_lm("gpt2", n_layer=1, n_embd=32, n_head=2)), target)
    assert not exits_early(target, TargetModel(first_layers(model, 2)))


def fresh_row(model: TargetModel, token_ids: Sequence[int]) -> Tensor:
    """Logits after a text, without any cache."""
    with torch.inference_mode():
        row: Tensor = model.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
        return row


def test_exclusion_gives_way_when_nothing_else_could_be_drawn() -> None:
    """All of the draft model's mass on a cached token: it may be drawn again, and is one node, listed as drawn."""
    model, builder = tiny(), TreeBuilder()
    top = int(fresh_row(model, [3, 1, 4]).argmax())
    builder.add_fixed(ROOT, top, "recall")
    beginning(model, [3, 1, 4], SamplingParams(temperature=0.8, top_k=1), "traversal").draw(
        builder, 1, CounterRng(5, 0)
    )
    tree = builder.build()
    check_tree(tree)
    assert tree.token_ids == (top,)
    assert isinstance(tree.candidates[0].distribution, Sampled)


def test_a_draw_with_one_read_is_the_draw_of_the_same_random_number() -> None:
    """Siblings that leave much, little, nothing, and none at all; a row of one token."""
    generator, fell_back = torch.Generator().manual_seed(0), 0
    for number in range(120):
        row = torch.rand(12, generator=generator).pow(8 * (number % 3)).softmax(0)
        siblings = tuple(torch.randperm(12, generator=generator)[: number % 5].tolist())
        if number % 7 == 0:
            row = torch.zeros(12).index_fill_(0, torch.tensor([*siblings, 3]), 1.0)
            row /= row.sum()
        given = row, siblings, CounterRng(9, number), number, "draft"
        with torch.inference_mode(), HostWaits() as waits:
            token, distribution = sample_with_one_read(*given)
        assert waits.names == ["resolve_neg"], "one list is read"
        expected = sample_beside(*given)
        assert token == expected.token_id
        assert isinstance(distribution, Sampled)
        assert isinstance(expected.distribution, Sampled)
        assert (distribution.excluded, distribution.row is row) == (expected.distribution.excluded, True)
        fell_back += bool(siblings) and not distribution.excluded
    assert fell_back > 2
