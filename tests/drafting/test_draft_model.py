"""The draft model as a drafter: the shared contract, its own KV cache in step, and what it excludes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter
from precedent.drafters.model.distribution import DraftedToken, sample_beside, sample_with_one_read
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.model.place import CATCH_UP_LIMIT
from precedent.drafters.request import Request
from precedent.errors import GenerationError
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng
from precedent.target import TargetModel
from precedent.tree import ROOT, Sampled, TreeBuilder
from precedent_cuda.host_waits import HostWaits
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.drafters import OracleDrafter, RandomDrafter
from precedent_testing.tiny_models import tiny_causal_lm
from precedent_testing.trees import check_tree

TINY = {"vocab_size": 16, "num_hidden_layers": 2, "hidden_size": 16, "seed": 31}


class TestDraftModelDrafter(DrafterContract):
    """A draft model keeps the contract of every drafter."""

    def make_drafter(self) -> Drafter:
        """A fresh tiny model with the same weights each time."""
        return DraftModelDrafter(TargetModel(tiny_causal_lm("llama", **TINY)))


class TestRandomDrafter(DrafterContract):
    """The shipped adversary keeps the contract as well."""

    def make_drafter(self) -> Drafter:
        """A seeded adversary that never proposes the end token."""
        return RandomDrafter(2)


class TestOracleDrafter(DrafterContract):
    """The shipped ceiling."""

    output = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9)

    def make_drafter(self) -> Drafter:
        """An oracle that knows the contract's output and more."""
        return OracleDrafter([*self.output, 3, 4, 1])


def drafting_on(model: TargetModel, prompt: list[int], sampling: SamplingParams, mode: str) -> object:
    """A draft model at work on a prompt."""
    return DraftModelDrafter(model).begin(Request("r", tuple(prompt), sampling, mode=mode))


def fresh_row(model: TargetModel, token_ids: list[int]) -> torch.Tensor:
    """Logits after a text, without any cache."""
    with torch.inference_mode():
        return model.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("missed", [1, 3, CATCH_UP_LIMIT + 9])
def test_the_draft_models_kv_cache_stays_in_step(missed: int) -> None:
    """Whatever was drafted and rejected before, the next draws are those of a fresh model (float64)."""
    model, choose = TargetModel(tiny_causal_lm("llama", **TINY)), random.Random(1)
    context = [3, 1, 4, 1, 5]
    session = drafting_on(model, context, SamplingParams(), "greedy")
    for step in range(6):
        builder = TreeBuilder()
        session.draw(builder, 3, CounterRng(0, step))
        expected, text = [], list(context)
        for _ in range(3):
            expected.append(int(fresh_row(model, text).argmax()))
            text.append(expected[-1])
        assert builder.token_ids == expected
        new = [choose.randrange(16) for _ in range(missed)] if step % 2 else [*expected, 7][: choose.randrange(1, 5)]
        session.committed(new)
        context += new


def test_draws_carry_the_row_they_were_drawn_from_without_the_cached_siblings() -> None:
    """The law of the first draw is the draft model's own row, the cached tokens excluded."""
    model, sampling = TargetModel(tiny_causal_lm("llama", **TINY)), SamplingParams(temperature=0.8, top_p=0.95)
    session = drafting_on(model, [3, 1, 4], sampling, "traversal")
    builder = TreeBuilder()
    cached = [int(token) for token in fresh_row(model, [3, 1, 4]).topk(2).indices]
    for token in cached:
        builder.add_fixed(ROOT, token, "recall")
    session.draw(builder, 1, CounterRng(5, 0))
    tree = builder.build()
    check_tree(tree)
    drawn = tree.candidates_at[ROOT][0]
    assert isinstance(drawn.distribution, Sampled)
    expected = probs_of(fresh_row(model, [3, 1, 4]), sampling)
    expected[cached] = 0
    torch.testing.assert_close(drawn.distribution.probs(), expected / expected.sum(), rtol=0, atol=1e-12)
    assert tree.token_ids[drawn.child] not in cached


def test_exclusion_gives_way_when_nothing_else_could_be_drawn() -> None:
    """All of the draft model's mass on a cached token: it may be drawn again, and is one node, listed as drawn."""
    model = TargetModel(tiny_causal_lm("llama", **TINY))
    top = int(fresh_row(model, [3, 1, 4]).argmax())
    session = drafting_on(model, [3, 1, 4], SamplingParams(temperature=0.8, top_k=1), "traversal")
    builder = TreeBuilder()
    builder.add_fixed(ROOT, top, "recall")
    session.draw(builder, 1, CounterRng(5, 0))
    tree = builder.build()
    check_tree(tree)
    assert tree.token_ids == (top,)
    assert isinstance(tree.candidates[0].distribution, Sampled)


def test_a_draw_with_one_read_is_the_draw_of_the_same_coin() -> None:
    """Siblings that leave much, little, nothing, and none at all; a row of one token."""
    generator, fell_back = torch.Generator().manual_seed(0), 0
    for number in range(300):
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
    assert fell_back > 5


@pytest.mark.parametrize("draw", [sample_beside, sample_with_one_read])
def test_a_row_that_holds_nan_is_not_drawn_from(draw: Callable[..., DraftedToken]) -> None:
    with pytest.raises(GenerationError, match="hold NaN"):
        draw(torch.full((5,), torch.nan), (1,), CounterRng(0, 0), 0, "draft")


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
    model, choose = TargetModel(tiny_causal_lm("llama", **TINY)), random.Random(2)
    first = [choose.randrange(1, 16) for _ in range(60)]
    later, resembling = [*first, 3, 1, 4], [*first[:40], 9, 9, 9]
    drafter, alone = DraftModelDrafter(model), [turn(DraftModelDrafter(model), p, "a")[1] for p in (later, resembling)]
    assert turn(drafter, first, "shop")[0] == len(first)
    assert turn(drafter, later, "bank") == (len(later), alone[0])
    assert turn(drafter, later, "shop") == (len(later) - len(first), alone[0])
    assert turn(drafter, resembling, "shop") == (3, alone[1])
    drafter.close()
    assert turn(drafter, later, "shop") == (len(later), alone[0])
