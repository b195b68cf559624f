"""The target model: a scored tree equals plain forwards along every path, and leaves no trace but the accepted one."""

from __future__ import annotations

import random

import pytest
import torch

from precedent.errors import ContextOverflowError, PromptError
from precedent.target import Slot, TargetModel
from precedent.target.contract import NOTHING_PENDING
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder, chain
from precedent_cpu.linear import PackedLinear, pack_linears
from precedent_testing.tiny_models import tiny_causal_lm


def random_tree(seed: int, num_nodes: int, vocab_size: int = 259) -> CandidateTree:
    """A random tree of points."""
    choose, builder, nodes = random.Random(seed), TreeBuilder(), [ROOT]
    for _ in range(num_nodes):
        nodes.append(builder.add_fixed(choose.choice(nodes), choose.randrange(vocab_size), "test"))
    return builder.build()


def random_ids(seed: int, count: int) -> list[int]:
    """Random token ids."""
    choose = random.Random(seed)
    return [choose.randrange(256) for _ in range(count)]


def plain_logits(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    """Logits after the last token by a forward without any cache, [vocab_size]."""
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def full_attention(model_type: str, **settings: object) -> TargetModel:
    """A tiny model of this architecture."""
    return TargetModel(tiny_causal_lm(model_type, **settings))


def keys_and_values(slot: Slot) -> torch.Tensor:
    """Everything committed, [layers, 2, heads, length, head_dim]."""
    return torch.stack([torch.cat(layer.rows(0, slot.kv.length)) for layer in slot.kv.layers])


def test_the_kv_cache_is_as_if_nothing_had_been_speculated() -> None:
    """After scoring trees and committing scattered paths, the cache equals that of plain decoding."""
    target, prompt = full_attention("llama"), random_ids(6, 40)
    speculated, plain = target.new_slot(), target.new_slot()
    target.prefill(speculated, prompt)
    for round_number in range(8):
        tree = random_tree(100 + round_number, 15)
        target.score([(speculated, tree)])
        path = tree.path_to(random.Random(round_number).randrange(len(tree)))
        target.commit(speculated, tree, path, next_token=round_number)
    target.prefill(plain, [*speculated.token_ids, speculated.pending])
    assert plain.token_ids == speculated.token_ids
    torch.testing.assert_close(keys_and_values(speculated), keys_and_values(plain), rtol=0, atol=1e-9)


def test_discard_forgets_whatever_was_scored() -> None:
    """A score without a commit changes neither the length nor the next logits."""
    target, prompt = full_attention("llama"), random_ids(7, 30)
    slot = target.new_slot()
    target.prefill(slot, prompt)
    before = target.plain_step(slot).clone()
    target.score([(slot, random_tree(8, 12))])
    target.discard(slot)
    assert slot.kv.length == len(slot.token_ids) == len(prompt) - 1
    torch.testing.assert_close(target.plain_step(slot), before, rtol=0, atol=0)


@pytest.mark.parametrize("shared", [0, 1, 33, 59])
def test_prefill_reuses_exactly_the_common_prefix(shared: int) -> None:
    """A second prompt recomputes only what differs, and its logits are those of a fresh prefill."""
    target = full_attention("qwen3")
    first = random_ids(9, 60)
    second = [*first[:shared], *((token + 1) % 256 for token in first[shared:]), 5, 6, 7]
    slot = target.new_slot()
    target.prefill(slot, first)
    assert target.prefill(slot, second) == min(shared, len(first) - 1)
    torch.testing.assert_close(target.plain_step(slot)[0], plain_logits(target, second), rtol=0, atol=1e-9)


def test_a_fork_leaves_its_origin_alone() -> None:
    """Two conversations that share a prefix do not disturb each other."""
    target, prompt = full_attention("llama"), random_ids(10, 50)
    origin = target.new_slot()
    target.prefill(origin, prompt)
    branch = target.fork(origin, 30)
    target.prefill(branch, [*prompt[:30], 1, 2, 3])
    torch.testing.assert_close(target.plain_step(origin)[0], plain_logits(target, prompt), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        target.plain_step(branch)[0], plain_logits(target, [*prompt[:30], 1, 2, 3]), rtol=0, atol=1e-9
    )


def test_prefill_in_chunks_equals_prefill_at_once() -> None:
    """Chunk borders leave no trace in the logits."""
    target, prompt = full_attention("llama"), random_ids(11, 50)
    slot = target.new_slot()
    target.prefill(slot, prompt, chunk=7)
    torch.testing.assert_close(target.plain_step(slot)[0], plain_logits(target, prompt), rtol=0, atol=1e-9)


def test_a_prompt_is_computed_in_pieces_of_the_callers_size() -> None:
    """`begin_prefill` computes nothing, each `continue_prefill` at most what it may, and only the last one is ready."""
    target, prompt = full_attention("llama"), random_ids(15, 20)
    slot = target.new_slot()
    assert target.begin_prefill(slot, prompt) == 0
    with pytest.raises(ValueError, match="finish its prefill"):
        target.plain_step(slot)
    lengths = []
    while not target.continue_prefill(slot, prompt, 8):
        lengths.append(slot.kv.length)
        assert slot.pending == NOTHING_PENDING
    assert (lengths, slot.kv.length, slot.pending) == ([8, 16], 19, prompt[-1])
    torch.testing.assert_close(target.plain_step(slot)[0], plain_logits(target, prompt), rtol=0, atol=1e-9)


def test_an_empty_prompt_is_refused() -> None:
    """There would be no token to predict from."""
    target = full_attention("llama")
    with pytest.raises(PromptError, match="empty"):
        target.begin_prefill(target.new_slot(), [])


@pytest.mark.parametrize("num_tokens", [1, 256, 257, 5000])
def test_a_sequence_takes_the_bytes_that_were_announced(num_tokens: int) -> None:
    """`kv_bytes` is what the buffers of a sequence of that length hold, rounding included."""
    target = full_attention("llama", max_position_embeddings=8192)
    slot = target.new_slot()
    assert slot.kv.nbytes == 0
    slot.kv.reserve(num_tokens)
    assert slot.kv.nbytes == target.kv_bytes(num_tokens)
    assert num_tokens <= target.kv_bytes(num_tokens) / target.kv_shape.row_bytes < num_tokens * 1.125 + 256


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    """The error names both lengths and the slot stays usable."""
    target = full_attention("llama", max_position_embeddings=32)
    slot = target.new_slot()
    with pytest.raises(ContextOverflowError, match=r"32 tokens.*holds 32"):
        target.prefill(slot, [1] * 32)
    target.prefill(slot, [1] * 31)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linears_compute_the_same_product(dtype: torch.dtype) -> None:
    """Packing changes the order of summation, nothing else; the state dict keeps its names and values."""
    model = tiny_causal_lm("llama", dtype=dtype, attention_bias=True)
    names = list(model.state_dict())
    inputs = torch.tensor([random_ids(12, 24)])
    with torch.inference_mode():
        before = model(inputs).logits.float()
        assert pack_linears(model) > 0
        after = model(inputs).logits.float()
    assert list(model.state_dict()) == names
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    assert (before - after).abs().max() < tolerance * before.abs().max()


def test_a_packed_linear_notices_new_weights() -> None:
    """Loading other weights into a packed model is not answered with the old ones."""
    model = tiny_causal_lm("llama", dtype=torch.float32, seed=1)
    other = tiny_causal_lm("llama", dtype=torch.float32, seed=2)
    inputs = torch.tensor([random_ids(13, 10)])
    with torch.inference_mode():
        pack_linears(model)
        model(inputs)
        expected = other(inputs).logits
    model.load_state_dict(other.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs).logits, expected, rtol=1e-3, atol=1e-3)


def test_commit_of_an_empty_tree_is_a_plain_step() -> None:
    """Plain decoding goes through the same four calls."""
    target, prompt = full_attention("llama"), random_ids(14, 12)
    slot = target.new_slot()
    target.prefill(slot, prompt)
    for _ in range(5):
        token = int(target.plain_step(slot)[0].argmax())
        assert token == int(plain_logits(target, prompt).argmax())
        target.commit(slot, EMPTY_TREE, (), token)
        prompt = [*prompt, token]
    assert chain([]).token_ids == ()
