"""Layers with an indexer: nodes attend to what plain decoding would choose among the prefix and their ancestors.

The tiny models choose four tokens, qwen4_exp two blocks of four and the last ones: a wrong choice shows.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.hybrids import hybrid, prefilled, random_ids, random_tree
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from precedent.target import Slot, TargetModel
from precedent.target.load.first_layers import exits_early, first_layers
from precedent.tree import EMPTY_TREE, CandidateTree
from precedent_models import layers
from precedent_testing.sweep import IN_FLOAT32, compare, config_class_of, in_float64, tiny_model
from precedent_testing.tiny_configs import tiny_config

FAMILIES = (
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen4_exp_text",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("axk2", "hy_v4", "dots3_note_text")),
)

NEAR = 1e-5
"""transformers computes norms and an indexer's scores in float32 whatever the model's dtype is."""


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=NEAR)


def next_logits(slot: Slot, target: TargetModel) -> torch.Tensor:
    logits = target.plain_step(slot)[0].clone()
    target.discard(slot)
    return logits


def stored(slot: Slot) -> list[torch.Tensor]:
    """Committed keys, values and index keys of every layer."""
    layers = [part for layer in slot.kv.layers for part in (layer, layer.extra) if part is not None and part.block]
    return [tensor for layer in layers for tensor in layer.rows(0, slot.kv.length)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_trees_equal_plain_forwards_along_every_path(model_type: str) -> None:
    """At every node, and after scattered paths were accepted; if the indexers choose everything, that is seen."""
    target, plain = hybrid(model_type), in_float64(tiny_model(model_type))
    assert target.runner.way == "a tree"
    assert compare(target, plain) < IN_FLOAT32
    for module in plain.modules():
        for name in ("index_topk", "block_topk", "token_budget"):
            if hasattr(module, name):
                setattr(module, name, 512)
    assert compare(target, plain) > 100 * IN_FLOAT32


def with_ties(model_type: str) -> PreTrainedModel:
    """A tiny model with two heads in its indexers: many scores are exactly 0."""
    config = tiny_config(config_class_of(model_type))
    config.index_n_heads, config._experts_implementation = 2, "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.eval()


@torch.inference_mode()
def decoded(model: PreTrainedModel, prompt: list[int], tree: CandidateTree) -> torch.Tensor:
    """Logits after the prompt and at every node, as transformers decodes with its own cache, token by token."""
    behind_prompt, rows = DynamicCache(config=model.config), []

    def step(cache: DynamicCache, token: int) -> torch.Tensor:
        return model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]

    *_, first = (step(behind_prompt, token) for token in prompt)
    for node in range(len(tree)):
        cache = copy.deepcopy(behind_prompt)
        *_, last = (step(cache, token) for token in tree.tokens_to(node))
        rows.append(last)
    return torch.stack([first, *rows])


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_equal_scores_are_settled_as_plain_decoding_settles_them(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's choice among equal scores depends on their number: in trees and prompts, on what is hidden."""
    settled, right = [], layers._settled

    def watch(scores: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        before = indices.clone()
        after = right(scores, values, indices)
        settled.append(not torch.equal(before.sort().values, after.sort().values))
        return after

    prompt, tree = random_ids(1, 40), random_tree(2, 8)
    plain = decoded(with_ties(model_type), prompt, tree)

    def distance() -> float:
        """How far the tree behind the prompt in pieces is off transformers' own decoding, at most."""
        target = TargetModel(with_ties(model_type))
        return float((target.score([(prefilled(target, prompt, chunk=17), tree)])[0] - plain).abs().max())

    monkeypatch.setattr(layers, "_settled", watch)
    assert distance() < NEAR
    assert any(settled)
    monkeypatch.setattr(layers, "_settled", lambda scores, values, indices: indices)
    assert distance() > 100 * NEAR


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_the_first_layers_share_the_index_keys(model_type: str) -> None:
    """An early exit runs ahead over the target's cache and leaves what is committed alone."""
    target = hybrid(model_type)
    draft = TargetModel(first_layers(target.model, 2))
    assert exits_early(draft, target)
    slot = prefilled(target, random_ids(1, 40))
    before = [part.clone() for part in stored(slot)]
    early = Slot(slot.kv.first_layers(2), pending=slot.pending)
    own = prefilled(draft, [*slot.token_ids, slot.pending])
    close(draft.score([(early, EMPTY_TREE)])[0], draft.score([(own, EMPTY_TREE)])[0])
    for part, as_before in zip(stored(slot), before, strict=True):
        torch.testing.assert_close(part, as_before, rtol=0, atol=0)


def test_blocks_of_keys_follow_single_paths() -> None:
    """MiniMax-M3 counts its blocks by places in the cache: along one path those are positions."""
    target = TargetModel(tiny_model("minimax_m3_vl_text"))
    assert target.one_path
    assert "blocks of keys" in (target.runner.only_chains or "")
    assert any(target.kv_shape.extra)
    assert compare(target, tiny_model("minimax_m3_vl_text")) < IN_FLOAT32
