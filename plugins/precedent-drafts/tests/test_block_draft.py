"""The drafter `block-draft`: what a block believes, the candidates that it gives, and the contract of every drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.draft_head_engines import AlwaysOpen
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.small_engines import PLAIN, PROMPT
from helpers.tiny_block import settings_for, tiny_block_draft, tiny_pair
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.drafters.base import Asked, Drafter
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ModelLoadError
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Limits, Planner
from precedent.target import Slot, TargetModel
from precedent_drafts.block_draft import BlockDraft, load_block_draft, save_block_draft
from precedent_drafts.block_drafter import BlockDrafter, best_first, chances
from precedent_drafts.block_model import BlockModel
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

Floats = NDArray[np.float64]


# The best tree of a block


def all_paths(first: Floats, steps: Floats, ends: NDArray[np.bool_]) -> dict[tuple[int, ...], float]:
    """Every path that stops at an end, with its probability."""
    found: dict[tuple[int, ...], float] = {}
    for length in range(1, steps.shape[0] + 2):
        for path in product(range(first.size), repeat=length):
            chance = first[path[0]]
            for depth in range(1, length):
                chance *= steps[depth - 1, path[depth - 1], path[depth]]
            if not any(ends[depth, choice] for depth, choice in enumerate(path[:-1])):
                found[path] = float(chance)
    return found


def paths_of(first: Floats, steps: Floats, ends: NDArray[np.bool_], budget: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for depth, choice, parent in zip(*(each.tolist() for each in best_first(first, steps, ends, budget)), strict=True):
        paths.append((choice,) if parent < 0 else (*paths[parent], choice))
        assert len(paths[-1]) == depth + 1
    return paths


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 7, 30, 500])
def test_the_tree_holds_the_likeliest_paths(seed: int, budget: int) -> None:
    """Against brute force, in the order of their probability, whatever ends where; parents come first."""
    random = np.random.default_rng(seed)
    first, steps = random.dirichlet([0.4] * 4), random.dirichlet([0.4] * 4, size=(3, 4))
    ends = random.random((4, 4)) < 0.2
    known = all_paths(first, steps, ends)
    assert paths_of(first, steps, ends, budget) == sorted(known, key=lambda path: -known[path])[:budget]


def test_nothing_impossible_is_taken() -> None:
    """Probability 0 ends the tree before its budget, and equals come in the order of their parents."""
    first, steps = np.array([0.5, 0.5, 0.0]), np.zeros((1, 3, 3))
    steps[0, 1, 2] = 1.0
    assert paths_of(first, steps, np.zeros((2, 3), np.bool_), 9) == [(0,), (1,), (1, 2)]


# What a block believes


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


# Folders and engines

BLOCK = SpeculationConfig(drafters=("block-draft",))


def target_model() -> PreTrainedModel:
    return tiny_causal_lm(scale=1.5)


def engine_on(model: PreTrainedModel, draft: Any, **settings: Any) -> Engine:
    """An engine for which width is free, and forwards too."""
    engine = Engine(model, byte_tokenizer(), name="tiny", cost=CostCurve(), draft_model=draft, **settings)
    planner: Any = engine.planner
    planner.gates["block-draft"] = AlwaysOpen()
    return engine


def test_chains_are_drawn_where_the_folder_says_so(tmp_path: Path) -> None:
    """Samples in a sampled request, candidates in a greedy one, and the greedy answer of plain decoding."""
    model = target_model()
    engine = engine_on(model, tiny_block_draft(model, proposes="chain"))
    sampled = engine.submit(PROMPT, SamplingParams(temperature=0.8, max_tokens=30), speculation=BLOCK).result()
    greedy, plain = (
        engine.submit(PROMPT, SamplingParams(max_tokens=20), speculation=each).result() for each in (BLOCK, PLAIN)
    )
    engine.close()
    assert sampled.stats.drafted_by_source["block-draft"] > 0
    assert greedy.stats.drafted_by_source["block-draft"] > 0
    assert greedy.token_ids == plain.token_ids


def test_a_folder_is_a_draft_model(tmp_path: Path) -> None:
    """What is saved is what is loaded, by the same name as any draft model."""
    model = target_model()
    draft = tiny_block_draft(model, range(0, 259, 2))
    save_block_draft(tmp_path, draft, torch.float64)
    again = load_draft(tmp_path, model, byte_tokenizer())
    assert again.settings == draft.settings  # type: ignore[union-attr]
    for name, weight in load_block_draft(tmp_path, model).own_weights().items():
        assert torch.equal(weight, draft.own_weights()[name])
    engine = engine_on(model, tmp_path)
    assert engine.submit(PROMPT, SamplingParams(max_tokens=8)).result().stats.drafted_by_source["block-draft"] > 0
    engine.close()


def test_drafts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Another target's embeddings or layers, a torn file, another format, and settings that nothing supports."""
    model = target_model()
    save_block_draft(tmp_path, tiny_block_draft(model), torch.float64)
    other, deeper = tiny_causal_lm(seed=5), target_model()
    with torch.no_grad():
        next(deeper.base_model.layers.parameters()).add_(1.0)
    with pytest.raises(ModelLoadError, match="uses its embeddings, which differ"):
        load_draft(tmp_path, other, byte_tokenizer())
    with pytest.raises(ModelLoadError, match="reads the layers of"):
        load_draft(tmp_path, deeper, byte_tokenizer())
    config = tmp_path / "config.json"
    good = config.read_text(encoding="utf-8")
    for old, new, says in (
        ('"format": 1', '"format": 2', "of format 2"),
        ('"markov_rank": 6', '"markov_rank": 7', r"do not fit its config: markov"),
        ('"num_head_tokens": 259', '"num_head_tokens": 200', r"do not fit its config: head.token_ids"),
        ('"block_size": 4', '"block_size": 40', "must lie between 2 and 16"),
        ('"reads": [', '"read": [', "cannot be read"),
        ('"condition": "target"', '"condition": "none"', "does not fit the condition none"),
    ):
        assert old in good
        config.write_text(good.replace(old, new), encoding="utf-8")
        with pytest.raises(ModelLoadError, match=says):
            load_draft(tmp_path, model, byte_tokenizer())


def test_what_cannot_go_together_is_refused() -> None:
    """Layers that the target lacks."""
    model = target_model()
    assert settings_for(model, 259, reads=(2, 9)).reads == (2, 9)
    with pytest.raises(ConfigError, match="has the layers 1 to 3"):
        engine_on(model, tiny_block_draft(model, reads=(2, 9)))


def test_the_planner_asks_only_where_a_forward_pays() -> None:
    """Cheap forwards that bring much are asked for, dear ones are not, and not where everything is known."""
    limits = Limits(16, 0, 20, frozenset())
    curve = CostCurve.through({1: 10.0, 32: 10.0})

    def asked(milliseconds: float, gain: float, open_mass: float) -> bool:
        planner = Planner(curve)
        for _ in range(4):  # the first steps only try
            planner.forward_pays("block-draft", 1, without._replace(open_mass=1.0), limits)
            planner.observe_forward_of("block-draft", 1, milliseconds, 1)
        planner.gates["block-draft"].tokens = gain
        return planner.forward_pays("block-draft", 1, without._replace(open_mass=open_mass), limits)

    without = Planner(curve).without([], limits)
    assert (without.expected, without.rows, without.open_mass) == (1.0, 0, 1.0)
    assert asked(2.0, 1.0, 1.0)
    assert not asked(12.0, 1.0, 1.0)
    assert not asked(2.0, 0.1, 1.0)
    assert not asked(2.0, 1.0, 0.05)


def test_a_draft_of_tokens_alone_says_so_and_fits_other_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no fusion, the target keeps nothing for it, and another target of the same embeddings is a warning."""
    model = target_model()
    target = TargetModel(model)
    before = target.kv_shape
    save_block_draft(tmp_path, tiny_block_draft(model, condition="none"), torch.float64)
    loaded = load_block_draft(tmp_path, model)
    assert (loaded.settings.condition, loaded.settings.reads, loaded.fusion) == ("none", (), None)
    assert not [name for name in loaded.own_weights() if name.startswith("fusion")]
    BlockModel(loaded, target)
    assert target.kv_shape == before
    assert caplog.messages == []
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.5)
    load_block_draft(tmp_path, model)
    assert "fewer of its tokens will be accepted" in caplog.messages[0]
    BlockModel(tiny_block_draft(model), target)
    assert target.kv_shape != before


@pytest.mark.parametrize("changes", [{"condition": "words"}, {"condition": "none", "reads": (1,)}, {"reads": ()}])
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, object]) -> None:
    """What is read follows from the condition."""
    with pytest.raises(ModelLoadError, match="condition"):
        settings_for(tiny_causal_lm(), 259, **changes)


@cache
def place_of(condition: str, prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = tiny_pair(condition=condition)
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


@pytest.mark.parametrize("condition", ["target", "none"])
class TestBlockDrafter(DrafterContract):
    """The contract of every drafter, for drafts that read their target and for those that read tokens alone."""

    vocab_size = 259

    @pytest.fixture(autouse=True)
    def _conditioned(self, condition: str) -> None:
        self.condition = condition

    def make_drafter(self) -> Drafter:
        """A random draft of a tiny Llama."""
        return BlockDrafter(tiny_pair(condition=self.condition)[1])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(self.condition, request.prompt_ids))
