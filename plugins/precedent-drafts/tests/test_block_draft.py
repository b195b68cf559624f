"""The drafter `block-draft`: what a block believes, the candidates that it gives, and the contract of every drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.tiny_block import tiny_block_draft, tiny_pair
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from precedent.config import SamplingParams
from precedent.drafters.base import Asked, Drafter
from precedent.drafters.request import Request
from precedent.errors import ConfigError
from precedent.target import Slot, TargetModel
from precedent_drafts.block_draft import BlockDraft
from precedent_drafts.block_drafter import BlockDrafter, chances
from precedent_drafts.block_model import BlockModel
from precedent_testing.drafter_contract import DrafterContract


def written_out(draft: BlockDraft, states: Tensor, tokens: Sequence[int]) -> Tensor:
    """The formula: rows of a block see each other and the fused states of the text before, `[rows, columns]`."""
    settings, hidden = draft.settings, draft.inputs(torch.tensor(tokens))
    fused = draft.fusion(states)
    positions = torch.arange(len(fused) + len(tokens), dtype=torch.float64)
    dim = settings.head_dim
    angles = positions[:, None] / settings.rope_theta ** (torch.arange(0, dim, 2) / dim).double()

    def turned(rows: Tensor, first: int) -> Tensor:
        heads = rows.view(len(rows), rows.shape[-1] // dim, dim)
        angle = angles[first : first + len(rows), None].float().double()
        left, right = heads[..., : dim // 2], heads[..., dim // 2 :]
        cos, sin = angle.float().cos().double(), angle.float().sin().double()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    for layer in draft.model.layers:
        attention, before = layer.self_attn, layer.input_layernorm(hidden)
        query = turned(attention.q_proj(before), len(fused)).transpose(0, 1)
        key = torch.cat([turned(attention.k_proj(fused), 0), turned(attention.k_proj(before), len(fused))])
        value = torch.cat([attention.v_proj(fused), attention.v_proj(before)]).view(
            len(key), settings.num_kv_heads, dim
        )
        groups = settings.num_heads // settings.num_kv_heads
        wide = [part.transpose(0, 1).repeat_interleave(groups, 0) for part in (key, value)]
        seen = scaled_dot_product_attention(query, *wide).transpose(0, 1).flatten(1)
        hidden = hidden + attention.o_proj(seen)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    found: Tensor = draft.head(draft.model.norm(hidden))
    return found


@torch.inference_mode()
def states_of(target: TargetModel, token_ids: Sequence[int], reads: Sequence[int]) -> Tensor:
    """What the draft reads of a text, from one plain forward."""
    seen: list[Tensor] = []
    for number in reads:
        layers = target.model.base_model.layers
        handle = layers[number - 1].register_forward_hook(lambda layer, inputs, output: seen.append(output[0]))
        target.model.base_model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        handle.remove()
    return torch.cat(seen, -1)


@torch.inference_mode()
def expected_block(target: TargetModel, model: BlockModel, text: Sequence[int], first: int) -> Tensor:
    tokens = [text[-1], *[model.draft.inputs.mask_id] * model.settings.block_size]
    states = states_of(target, text, model.settings.reads)[first : len(text) - 1]
    return written_out(model.draft, states, tokens)[1:]


def request_on(slot: Slot, sampling: SamplingParams | None = None, mode: str = "greedy") -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, sampling or SamplingParams(), mode=mode, target_slot=lambda: slot)


def test_a_block_is_what_the_formula_says_step_after_step() -> None:
    """Behind a long prompt and after commits of any size, for several requests in one forward."""
    target, model = tiny_pair()
    choose = random.Random(3)
    slots = [prefilled(target, random_ids(seed, count)) for seed, count in ((1, 60), (2, 1), (3, 9))]
    places = [model.place_beside(lambda slot=slot: slot, len(slot.token_ids) + 1) for slot in slots]  # type: ignore[misc]
    assert [place.first for place in places] == [35, 0, 0]
    for step in range(3):
        filled = model.fill([(place, slot.pending) for place, slot in zip(places, slots, strict=True)])
        for place, slot, block in zip(places, slots, filled, strict=True):
            expected = expected_block(target, model, [*slot.token_ids, slot.pending], place.first)
            torch.testing.assert_close(block.logits.double(), expected[:, :-1], rtol=0, atol=1e-4)
            torch.testing.assert_close(block.confidence.double(), expected[:, -1].sigmoid(), rtol=0, atol=1e-4)
            tree = random_tree(step, 3)
            target.score([(slot, tree)])
            target.commit(slot, tree, tree.path_to(choose.randrange(3)), choose.randrange(250))


def test_further_iterations_fill_in_what_is_surest() -> None:
    """The second forward knows the surest half of the block; each row is of the last forward that masked it."""
    target, model = tiny_pair()
    again = BlockModel(tiny_block_draft(target.model, iterations=2), target)
    slot = prefilled(target, random_ids(7, 20))
    text = [*slot.token_ids, slot.pending]
    once = expected_block(target, model, text, 0)[:, :-1]
    surest = set(once.softmax(-1).max(-1).values.topk(2).indices.tolist())
    mask = model.draft.inputs.mask_id
    row = [text[-1], *(int(once[k].argmax()) if k in surest else mask for k in range(4))]
    with torch.inference_mode():
        twice = written_out(model.draft, states_of(target, text, model.settings.reads)[:-1], row)[1:, :-1]
    expected = torch.stack([once[k] if k in surest else twice[k] for k in range(4)])
    (found,) = again.fill([(again.place_beside(lambda: slot, len(text)), text[-1])])
    torch.testing.assert_close(found.logits.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_estimates_are_the_blocks_with_its_markov_term(temperature: float) -> None:
    """With a head as small as the number of choices nothing is left out: they are softmaxes of the biased rows."""
    target = tiny_pair()[0]
    ids = [*range(0, 40, 2), 250, 251]
    model = BlockModel(tiny_block_draft(target.model, ids), target)
    slot = prefilled(target, random_ids(8, 20))
    (block,) = model.fill([(model.place_beside(lambda: slot, 21), slot.pending)])
    tokens, first, steps = chances(model, slot.pending, block, temperature, None)
    markov, logits = model.draft.markov, block.logits.double()
    column = {token: place for place, token in enumerate(ids)}

    def expected(position: int, previous: int) -> Tensor:
        with torch.no_grad():
            bias = markov(torch.tensor(column.get(previous, len(ids))))
        return ((logits[position] + bias) / temperature).softmax(-1)

    own = expected(0, slot.pending)
    np.testing.assert_allclose(first, [float(own[column[token]]) for token in tokens[0]], atol=1e-4)
    for position in range(1, 4):
        for place, previous in enumerate(tokens[position - 1]):
            row = expected(position, int(previous))
            wanted = [float(row[column[token]]) for token in tokens[position]]
            np.testing.assert_allclose(steps[position - 1, place], wanted, atol=1e-4)


def test_the_markov_term_chooses_among_all_tokens() -> None:
    """A token that the block alone gives little is a choice where the tokens before it call for it."""
    target = tiny_pair()[0]
    draft = tiny_block_draft(target.model)
    with torch.no_grad():
        draft.head.rows.weight.zero_()
        draft.markov.left.fill_(1.0)
        draft.markov.right.zero_()
        draft.markov.right[:, 200] = 3.0
    session = BlockDrafter(BlockModel(draft, target)).begin(request_on(prefilled(target, random_ids(8, 20))))
    candidates = session.match(4)
    assert candidates.token_ids == [200] * 4
    assert candidates.parents == [-1, 0, 1, 2]
    assert min(candidates.estimates) > 0.99


def test_tokens_beyond_the_tokenizer_are_never_proposed() -> None:
    """A head over padding ids keeps them to itself."""
    target, model = tiny_pair()
    slot = prefilled(target, random_ids(9, 20))
    request = replace(request_on(slot), num_tokens=5)
    candidates = BlockDrafter(model).begin(request).match(64)
    assert len(candidates) > 0
    assert max(candidates.token_ids) < 5


def test_sessions_run_together_as_alone() -> None:
    """One forward for all; a budget of 0 and an empty prompt take no part."""
    target, model = tiny_pair()
    drafter = BlockDrafter(model)
    slots = [prefilled(target, random_ids(seed, 15 + seed)) for seed in range(3)]
    alone = [drafter.begin(request_on(slot)).match(9) for slot in slots]
    asked = [Asked(drafter.begin(request_on(slot)), 9) for slot in slots]
    asked.insert(1, Asked(drafter.begin(request_on(slots[0])), 0))
    asked[0].session.match_together(asked)
    assert [each.error for each in asked] == [None] * 4
    for found, expected in zip([asked[0], *asked[2:]], alone, strict=True):
        assert found.candidates.token_ids == expected.token_ids
        np.testing.assert_allclose(found.candidates.estimates, expected.estimates, atol=1e-6)
    assert len(asked[1].candidates) == 0


def test_a_request_without_a_place_in_the_target_is_refused() -> None:
    """There would be nothing to read."""
    with pytest.raises(ConfigError, match="block-draft reads the layers of its target"):
        BlockDrafter(tiny_pair()[1]).begin(Request("r", (1, 2, 3), SamplingParams()))


@cache
def place_of(prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = tiny_pair()
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


class TestBlockDrafter(DrafterContract):
    """The contract of every drafter."""

    vocab_size = 259

    def make_drafter(self) -> Drafter:
        """A random draft of a tiny Llama."""
        return BlockDrafter(tiny_pair()[1])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(request.prompt_ids))
