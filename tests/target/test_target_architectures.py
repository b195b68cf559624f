"""Every architecture: trees equal plain forwards, batches equal single sequences, and what cannot work is refused."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.tiny_architectures import ARCHITECTURES, ONE_BY_ONE, WINDOW, settings_of
from transformers import AutoConfig

from precedent.errors import UnsupportedError
from precedent.target import KVCache, TargetModel
from precedent.target.support import layer_state_of
from precedent.tree import EMPTY_TREE, ROOT
from precedent_testing.tiny_models import tiny_causal_lm

EXACT = 1e-9

FLOAT32_INSIDE = {"gemma2": 1e-5, "llama4_text": 1e-5}
"""transformers computes capped scores or rotations of these in float32 whatever the model's dtype is."""


@cache
def target_of(architecture: str) -> TargetModel:
    return TargetModel(tiny_causal_lm(architecture, **settings_of(architecture)))


def stored(kv: KVCache) -> list[torch.Tensor]:
    """Committed keys and values of every layer that has some."""
    layers = [layer for layer in kv.layers if layer.block is not None]
    return [tensor for layer in layers for tensor in layer.rows(0, kv.length)]


def close(found: torch.Tensor, expected: torch.Tensor, architecture: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_INSIDE.get(architecture, EXACT))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled(3)
def test_a_scored_tree_equals_transformers_own_forward_along_every_path(architecture: str) -> None:
    """At every node the logits are those of an untouched model over prompt and path, without any cache (float64)."""
    untouched = tiny_causal_lm(architecture, **settings_of(architecture))
    target, prompt, tree = target_of(architecture), random_ids(1, 3 * WINDOW + 5), random_tree(2, 20)
    scored = target.score([(prefilled(target, prompt), tree)])[0]
    assert max(tree.depths) > 3
    for node in (ROOT, *range(len(tree))):
        with torch.inference_mode():
            expected = untouched(torch.tensor([[*prompt, *tree.tokens_to(node)]]), use_cache=False).logits[0, -1]
        close(scored[node + 1], expected, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kv_cache_is_that_of_plain_decoding(architecture: str) -> None:
    """After batched trees and scattered paths, every layer holds what plain decoding would have put there."""
    target = target_of(architecture)
    slots = [prefilled(target, random_ids(10, 21)), prefilled(target, random_ids(11, 4))]
    for step in range(4):
        trees = [random_tree(20 + step, 10), random_tree(30 + step, 6)]
        target.score(list(zip(slots, trees, strict=True)))
        for slot, tree in zip(slots, trees, strict=True):
            target.commit(slot, tree, tree.path_to(random.Random(step).randrange(len(tree))), next_token=step)
    for slot in slots:
        plain = prefilled(target, [*slot.token_ids, slot.pending])
        assert plain.token_ids == slot.token_ids
        for found, expected in zip(stored(slot.kv), stored(plain.kv), strict=True):
            close(found, expected, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_is_one_forward_where_the_architecture_allows_it(architecture: str) -> None:
    """Four sequences cost one call of the model, or four where attention cannot be told whose rows are whose."""
    target, calls = target_of(architecture), []
    slots = [prefilled(target, random_ids(seed, 5)) for seed in range(4)]
    hook = target.model.register_forward_hook(lambda *_: calls.append(1))
    target.score([(slot, EMPTY_TREE) for slot in slots])
    hook.remove()
    assert len(calls) == (4 if architecture in ONE_BY_ONE else 1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_wide_trees_and_long_chunks(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are folded, prefill behind a prefix, and scores in pieces: the same logits."""
    target, prompt, tree = target_of(architecture), random_ids(12, 180), random_tree(13, 90)
    expected = target.score([(prefilled(target, prompt), tree)])[0]
    monkeypatch.setattr("precedent.target.attention.SCORES_AT_ONCE", 4000)
    monkeypatch.setattr("precedent.target.attention.FOLDED_ROWS", 10)
    found = target.score([(prefilled(target, prompt, chunk=75), tree)])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text"])
def test_eager_attention_is_kept_where_it_was_asked_for(architecture: str) -> None:
    """It takes the same trees as 4D masks, windows included, one sequence after the other."""
    model = tiny_causal_lm(architecture, **settings_of(architecture))
    model.set_attn_implementation("eager")
    eager, fused = TargetModel(model), target_of(architecture)
    prompt, tree = random_ids(14, 40), random_tree(15, 9)
    assert model.config._attn_implementation == "eager"
    scored = [target.score([(prefilled(target, prompt), tree)])[0] for target in (eager, fused)]
    # transformers' eager attention computes its softmax in float32 whatever the model's dtype is
    torch.testing.assert_close(*scored, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_failed_forward_leaves_every_sequence_as_it_was(layer: int) -> None:
    """Out of memory in the middle of a batch: nothing is committed, and the next forward is right for all of them."""
    target = TargetModel(tiny_causal_lm("llama", **settings_of("llama")))
    slots = [prefilled(target, random_ids(seed, 250)) for seed in (16, 17)]  # the trees make the KV cache grow
    batch = [(slots[0], random_tree(18, 12)), (slots[1], random_tree(19, 3))]
    expected = [logits.clone() for logits in target.score(batch)]

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    hook = target.model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        target.score(batch)
    hook.remove()
    for slot in slots:
        target.discard(slot)
        assert slot.kv.length == len(slot.token_ids) == 249
    for logits, single in zip(target.score(batch), expected, strict=True):
        torch.testing.assert_close(logits, single, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_precision_scores_trees(dtype: torch.dtype) -> None:
    """The KV cache has the model's dtype, and a batch of trees is near to plain forwards as rounding allows."""
    target = TargetModel(tiny_causal_lm("qwen2", dtype=dtype, **settings_of("qwen2")))
    prompt, tree = random_ids(20, 30), random_tree(21, 8)
    slot = prefilled(target, prompt)
    logits = target.score([(slot, tree), (prefilled(target, prompt[:7]), EMPTY_TREE)])[0].float()
    assert {tensor.dtype for tensor in stored(slot.kv)} == {dtype}
    with torch.inference_mode():
        expected = target.model(torch.tensor([[*prompt, *tree.tokens_to(7)]]), use_cache=False).logits[0, -1].float()
    assert (logits[8] - expected).norm() < (1e-4 if dtype == torch.float32 else 0.1) * expected.norm()


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("rwkv", {}, "recurrent"),
        ("xlstm", {}, "recurrent"),
        ("qwen4_exp_text", {"ple_layer_ids": [1], "eos_token_id": 0}, "n-gram embeddings"),
        ("deepseek_v4", {}, "compressed_sparse_attention.*one compressed key for several tokens"),
        ("t5", {}, "encoder-decoder"),
    ],
)
def test_what_cannot_score_a_tree_is_refused_by_name(model_type: str, settings: dict, named: str) -> None:
    """The error names the model and the kind of layer that is in the way, before anything is loaded."""
    with pytest.raises(UnsupportedError, match=f"{model_type}.*{named}"):
        layer_state_of(AutoConfig.for_model(model_type, **settings))


def test_a_model_that_gets_a_tree_wrong_is_refused() -> None:
    """A BERT that is given as an object looks ahead; the examination of every model notices."""
    with pytest.raises(UnsupportedError, match=r"bert cannot be the target.*off"):
        TargetModel(tiny_causal_lm("bert", num_hidden_layers=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_examination_sees_what_should_be_hidden(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that see their siblings are noticed in every precision: single paths then, or a word about rounding.

    In bfloat16 the processor decides which, by how much its plain forwards round.
    """
    model = tiny_causal_lm("llama", dtype=dtype, **settings_of("llama"))
    TargetModel(model)
    assert caplog.records == []
    monkeypatch.setattr(
        "precedent.target.kv.rows.within", lambda rows, _: torch.ones((len(rows), len(rows)), dtype=torch.bool)
    )
    target = TargetModel(model)
    assert target.one_path or dtype == torch.bfloat16
    assert ("a tree is" if target.one_path else "a scored tree is") in caplog.text


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "longrope", "original_max_position_embeddings": 256}, 256),
    ],
)
def test_the_context_ends_where_rotary_frequencies_would_switch(rope: dict, length: int) -> None:
    """A tree across that point, or a prefill in pieces, would not be what plain decoding computes."""
    if rope["rope_type"] == "longrope":
        rope = {**rope, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    settings = settings_of("llama") | {"rope_parameters": {"rope_theta": 10000.0, **rope}}
    assert TargetModel(tiny_causal_lm("llama", **settings)).context_length == length
