"""`bitwise=True` on a CPU, with sliding windows and Gemma's layers: the same bits beside any number of rows."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache

import pytest
import torch
from helpers.bitwise_models import PLAIN, by_rows, model, tokens
from helpers.hybrids import prefilled, random_tree

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.target import Slot, TargetModel
from precedent.target.bitwise import MOST_ROWS
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

pytestmark = by_rows

EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
SHORT = {"sliding_window": 21}
MODELS = {
    "llama": ("llama", {}),
    "narrow": ("mistral", {"sliding_window": 5}),
    "odd": ("mistral", {"sliding_window": 37}),
    "wider than a forward": ("mistral", {"sliding_window": 70}),
    "one token": ("mistral", {"sliding_window": 1}),
    "every other layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 21, **EVERY_OTHER}),
    "norms of heads": ("qwen3", {"use_sliding_window": True, "sliding_window": 40, **EVERY_OTHER}),
    "gemma": ("gemma", {}),
    "gemma 2": ("gemma2", {"query_pre_attn_scalar": 100, "attn_logit_softcapping": 3.0, **EVERY_OTHER, **SHORT}),
    "gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 100, **EVERY_OTHER, **SHORT}),
    "vaultgemma": ("vaultgemma", {"attn_logit_softcapping": 3.0, **EVERY_OTHER, **SHORT}),
}
GREEDY, SEEDED = SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=5)


@lru_cache
def target_of(name: str, dtype: torch.dtype) -> TargetModel:
    family, settings = MODELS[name]
    return TargetModel(model(dtype, family, **settings), bitwise=True)


def in_float32(name: str) -> object:
    return pytest.param(
        (name, torch.float32), id=f"{name} in float32", marks=() if name == "gemma 2" else pytest.mark.exhaustive
    )


@pytest.fixture(params=[*(pytest.param((name, torch.bfloat16), id=name) for name in MODELS), *map(in_float32, MODELS)])
def target(request: pytest.FixtureRequest) -> TargetModel:
    return target_of(*request.param)


def decode(target: TargetModel, slot: Slot, path: list[int]) -> list[torch.Tensor]:
    """Logits of plain decoding before each token of `path` is appended, and at last after all of them."""
    rows = []
    for token in path:
        rows.append(target.plain_step(slot)[0].clone())
        target.commit(slot, EMPTY_TREE, (), token)
    rows.append(target.plain_step(slot)[0].clone())
    target.discard(slot)
    return rows


def same_bits(one: Slot, other: Slot) -> bool:
    length = len(one.token_ids)
    layers = [(one.kv.layer(number), other.kv.layer(number)) for number in range(len(one.kv.layers))]
    pairs = [pair for left, right in layers for pair in zip(left.rows(0, length), right.rows(0, length), strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.sampled(2)
def test_a_prompt_leaves_the_same_bits_however_it_was_computed(target: TargetModel) -> None:
    """At once, in pieces of several sizes, from a copied prefix, and token by token."""
    prompt = tokens(150, seed=1)
    whole, decoded, *pieces = (
        prefilled(target, *how) for how in ((prompt,), (prompt[:1],), (prompt, 3), (prompt, 29), (prompt, 50))
    )
    decode(target, decoded, prompt[1:])
    forked = target.fork(whole, 43)
    target.prefill(forked, prompt)
    assert all(same_bits(whole, other) for other in (decoded, forked, *pieces))


def test_without_it_pieces_of_a_prompt_round_otherwise() -> None:
    """The test above can fail: beyond the rows that the kernels take, sums are grouped otherwise."""
    target, prompt = TargetModel(model()), tokens(3 * MOST_ROWS, seed=1)
    whole, decoded = prefilled(target, prompt), prefilled(target, prompt[:1])
    decode(target, decoded, prompt[1:])
    assert not same_bits(whole, decoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_do_not_depend_on_how_many_are_scored_beside_them(dtype: torch.dtype) -> None:
    """Trees of several sequences, more rows together than one forward takes, against each alone."""
    target, tree = target_of("llama", dtype), random_tree(3, MOST_ROWS - 8)
    slots = [prefilled(target, tokens(30 + number, seed=number)) for number in range(4)]
    together = target.score([(slot, tree) for slot in slots])
    for slot, rows in zip(slots, together, strict=True):
        target.discard(slot)
        assert torch.equal(target.score([(slot, tree)])[0], rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [1, 36, 70, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (16, 120))])
def test_a_tree_is_scored_to_the_bit_as_plain_steps(target: TargetModel, length: int) -> None:
    """Beside another request, with a window that ends before the tree, within it, and within the prompt."""
    slot, beside = prefilled(target, tokens(length, seed=length)), prefilled(target, tokens(2 * length + 1, seed=2))
    path, builder, node = tokens(12, seed=7), TreeBuilder(), ROOT
    for token in path:
        builder.add_fixed(node, (token + 1) % 250, "test")
        node = builder.add_fixed(node, token, "test")
    tree = builder.build()
    rows = target.score([(slot, tree), (beside, tree)])[0][::2].clone()
    target.discard(slot)
    target.discard(beside)
    assert all(torch.equal(*pair) for pair in zip(rows, decode(target, slot, path), strict=True))


@pytest.mark.sampled(2)
def test_trees_of_any_size_give_the_bits_of_one_row_at_a_time(target: TargetModel) -> None:
    """Each node alone behind its own ancestors."""
    prompt, alone = tokens(40, seed=3), target.new_slot()
    slot = prefilled(target, prompt)
    for size in (0, 1, 2, 3, 5, 8, 15):
        tree = random_tree(size, size)
        rows = target.score([(slot, tree)])[0].clone()
        target.discard(slot)
        for node in range(ROOT, size):
            target.prefill(alone, [*prompt, *tree.tokens_to(node)])
            assert torch.equal(target.plain_step(alone)[0], rows[node + 1]), (size, node)
            target.discard(alone)


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["odd", "gemma 2"])
@pytest.mark.sampled(2)
def test_texts_are_the_same_with_drafts_and_without(name: str, sampling: SamplingParams) -> None:
    """With a cold cache and a draft model, then with a cache that holds the answers, all requests together."""
    target, draft = target_of(name, torch.bfloat16), model(torch.float32, num_hidden_layers=1)
    prompts = [tokens(30 + 25 * number, seed=number) for number in range(3)]
    with (
        SpeculationCache.open(embedder=HashEmbedder()) as cache,
        closing(Engine(target, byte_tokenizer(), name="m", cache=cache, draft_model=draft, bitwise=True)) as engine,
    ):
        engine.planner.cost = CostCurve()
        plain = [engine.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in prompts]
        for _ in range(2):
            streams = [engine.submit(prompt, sampling, query="order") for prompt in prompts]
            drafted = [stream.result() for stream in streams]
            assert [one.token_ids for one in drafted] == plain
        assert max(one.stats.num_accepted_tokens for one in drafted) > sampling.max_tokens // 2
