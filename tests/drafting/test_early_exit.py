"""Early exit: the target's own first layers as the draft model, on the target's own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.tiny_architectures import settings_of

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters.base import Drafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.target.load.first_layers import exits_early, first_layers
from precedent.tree import TreeBuilder, chain
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TINY = {"vocab_size": 16, "num_hidden_layers": 3, "hidden_size": 16, "seed": 31}


def pair(architecture: str = "llama", count: int = 2) -> tuple[TargetModel, TargetModel]:
    """A target and its own first layers."""
    model = tiny_causal_lm(architecture, **settings_of(architecture))
    return TargetModel(model), TargetModel(first_layers(model, count))


def prefilled(target: TargetModel, token_ids: Sequence[int] = PROMPT) -> Slot:
    slot = target.new_slot()
    target.prefill(slot, list(token_ids))
    return slot


def drawn(drafter: DraftModelDrafter, request: Request, num_draws: int = 4) -> list[int]:
    builder = TreeBuilder()
    drafter.begin(request).draw(builder, num_draws, CounterRng(3, 0))
    return list(builder.token_ids)


def request_on(slot: Slot, sampling: SamplingParams | None = None, mode: str = "greedy") -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, sampling or SamplingParams(), mode=mode, target_slot=lambda: slot)


@cache
def contract_pair() -> tuple[TargetModel, TargetModel]:
    model = tiny_causal_lm("llama", **TINY)
    return TargetModel(model), TargetModel(first_layers(model, 2))


@cache
def place_of(prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = contract_pair()
    slot = prefilled(target, prompt) if prompt else target.new_slot()
    return lambda: slot


class TestEarlyExitDrafter(DrafterContract):
    """The contract of every drafter holds where the KV cache is the target's."""

    def make_drafter(self) -> Drafter:
        """The first two layers of a tiny model."""
        return DraftModelDrafter(contract_pair()[1], early_exit=True)

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(request.prompt_ids))

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "stablelm"])
    def test_it_drafts_what_the_same_layers_draft_on_a_cache_of_their_own(self, architecture: str) -> None:
        """Sharing saves the prefill and changes nothing."""
        target, draft = pair(architecture, 1)
        request = request_on(prefilled(target))
        assert drawn(DraftModelDrafter(draft, early_exit=True), request) == drawn(DraftModelDrafter(draft), request)


def test_what_it_writes_does_not_reach_the_target() -> None:
    """Scoring after a draft gives the logits of scoring without, also when the buffers had to grow for the draft."""
    target, draft = pair()
    tree = chain([7, 8, 9])
    for length in (len(PROMPT), 255):  # 256 rows are a buffer's first size
        prompt = [token % 200 for token in range(length)]
        expected = target.score([(prefilled(target, prompt), tree)])[0]
        slot = prefilled(target, prompt)
        drawn(DraftModelDrafter(draft, early_exit=True), request_on(slot), 6)
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
        prompt = list(range(40, 90))
        speculation = SpeculationConfig(drafters=("draft-model",))
        reserved.append(engine._kv_bytes(50, 24, speculation, engine._drafters_named(("draft-model",))))
        result = engine.submit(prompt, sampling, speculation=speculation).result()
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
