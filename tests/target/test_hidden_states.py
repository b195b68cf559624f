"""Hidden states that a target keeps for drafters: those of plain forwards, whatever was scored, rewound or reused."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch
from helpers.bitwise_models import by_rows
from helpers.bitwise_models import model as row_model
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.packages import graph_settings
from helpers.tiny_architectures import settings_of
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target import Slot, TargetModel
from precedent.target.encoder_decoder.opening import target_of
from precedent.target.prefix_pool import PrefixPool
from precedent.testing.sweep import in_float64, tiny_model
from precedent.testing.tiny_models import tiny_causal_lm, tiny_seq2seq_lm
from precedent.tree import EMPTY_TREE

MODELS = {
    "llama": 1e-9,
    "llama in float32": 1e-4,
    "stablelm": 1e-9,
    "deepseek_v3": 1e-4,
    "glm4_moe": 1e-4,
    "qwen3_next": 1e-4,
}
"""Plain and fused layers, one sequence at a time, compressed keys, experts, states; and what float32 inside allows."""

TOLD = pytest.mark.parametrize("name", MODELS)


def model_of(name: str) -> PreTrainedModel:
    if name == "llama in float32":
        return row_model(torch.float32)
    if name in ("llama", "stablelm"):
        return tiny_causal_lm(name, **settings_of(name))
    return tiny_model(name)


class Kept:
    """A target that keeps hidden states, and an untouched copy of its model."""

    def __init__(self, name: str, *, after_norm: bool = True) -> None:
        model = model_of(name)
        self.plain: Any = copy.deepcopy(model) if name.startswith("llama in") else in_float64(copy.deepcopy(model))
        self.target, self.after_norm, self.within = TargetModel(model), after_norm, MODELS[name]
        self.target.keep_hidden_states(after_norm=after_norm)

    def check(self, slot: Slot) -> None:
        """The states of every committed token equal those of one plain forward."""
        hidden = self.target.runner.hidden
        assert hidden is not None
        assert slot.kv.length == len(slot.token_ids)
        found = hidden.of(slot.kv, 0, slot.kv.length)
        torch.testing.assert_close(found, self.expected(slot.token_ids), rtol=0, atol=self.within)

    @torch.inference_mode()
    def expected(self, token_ids: list[int]) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        base = self.plain.base_model
        handle = base.norm.register_forward_hook(lambda norm, inputs, output: seen.extend([inputs[0], output]))
        base(input_ids=torch.tensor([token_ids]), use_cache=False)
        handle.remove()
        return seen[1 if self.after_norm else 0][0]


@TOLD
@pytest.mark.parametrize("after_norm", [True, False])
def test_states_of_prompts_and_accepted_paths(name: str, after_norm: bool) -> None:
    """Pieces of a prompt, trees of several sequences in one forward, and the accepted path of each."""
    kept, choose = Kept(name, after_norm=after_norm), random.Random(1)
    slots = [prefilled(kept.target, random_ids(seed, count), chunk=7) for seed, count in ((1, 23), (2, 2), (3, 9))]
    for step in range(4):
        trees = [random_tree(10 * step + seed, 6, one_path=kept.target.one_path) for seed in range(3)]
        trees[step % 3] = EMPTY_TREE
        kept.target.score(list(zip(slots, trees, strict=True)))
        for slot, tree in zip(slots, trees, strict=True):
            path = tree.path_to(choose.randrange(len(tree))) if len(tree) else ()
            kept.target.commit(slot, tree, path, choose.randrange(250))
            kept.check(slot)


@TOLD
def test_states_follow_rewinds_forks_and_reused_prefixes(name: str) -> None:
    """Also what another conversation takes over, and what comes back from copies outside the model."""
    kept = Kept(name)
    target, prompt = kept.target, random_ids(4, 40)
    pool = PrefixPool(target)
    slot = pool.acquire("tenant", prompt)
    target.prefill(slot, prompt)
    fork = target.fork(slot, slot.kv.nearest(20))
    target.prefill(fork, [*prompt[:20], *random_ids(5, 9)])
    target.score([(slot, random_tree(6, 5, one_path=target.one_path))])
    pool.release("tenant", slot)
    again = pool.acquire("tenant", [*prompt, 5, 6, 7])
    assert target.prefill(again, [*prompt, 5, 6, 7]) > 0
    target.rewind(again, 30)
    target.prefill(again, [*prompt[:30], *random_ids(7, 12)])
    restored = target.restored(again.token_ids, again.kv.copied(again.kv.length))
    for each in (slot, fork, again, restored):
        kept.check(each)


def test_targets_that_share_a_model_do_not_see_each_others_rows() -> None:
    """A second engine's target, whose forward on another thread ends within one of the first."""
    kept, once = Kept("llama"), threading.Lock()
    other: Any = TargetModel(kept.target.model)
    other.keep_hidden_states(after_norm=False)

    def interrupt(norm: object, inputs: object, output: object) -> None:
        if once.acquire(blocking=False):
            thread = threading.Thread(target=prefilled, args=(other, random_ids(2, 30)))
            thread.start()
            thread.join()

    kept.target.model.base_model.norm.register_forward_hook(interrupt)
    kept.check(prefilled(kept.target, random_ids(1, 12)))


@by_rows
def test_bitwise_states_do_not_depend_on_what_is_beside_them() -> None:
    """A row's state has the same bits in a tree and alone, with all layers in one call."""
    target = TargetModel(row_model(torch.float32), bitwise=True)
    target.keep_hidden_states()
    assert target.runner.backends
    tree, prompt = random_tree(1, 6), random_ids(1, 12)
    slot = prefilled(target, prompt)
    target.score([(slot, tree)])
    target.commit(slot, tree, tree.path_to(5), 7)
    plain = prefilled(target, [*slot.token_ids, slot.pending])
    hidden = target.runner.hidden
    assert hidden is not None
    end = slot.kv.length
    assert torch.equal(hidden.of(slot.kv, 0, end), hidden.of(plain.kv, 0, end))


def test_nothing_is_kept_unasked() -> None:
    """A target that no drafter asks stores what it stored before; one that keeps states counts them."""
    model = tiny_causal_lm()
    target = TargetModel(model)
    before = target.kv_bytes(300)
    assert target.runner.hidden is None
    assert len(target.kv_shape.layers) == 3
    target.keep_hidden_states()
    shape = target.kv_shape
    target.keep_hidden_states()
    assert target.kv_shape == shape
    assert target.kv_bytes(300) - before == 512 * 48 * 8  # rows of a buffer, hidden size, bytes of a float64
    slot = prefilled(target, random_ids(1, 300))
    assert slot.kv.nbytes == target.kv_bytes(300)


def test_targets_that_cannot_keep_them_say_so() -> None:
    """Forwards of fixed size, encoder-decoder models, and models whose final norm has another name."""
    static = TargetModel(tiny_causal_lm(), cuda_graphs=graph_settings(arena_tokens=1024, capture=False))
    with pytest.raises(UnsupportedError, match=r"fixed size.*keep no hidden states"):
        static.keep_hidden_states()
    with pytest.raises(UnsupportedError, match="t5 is an encoder-decoder model, which keeps no hidden states"):
        target_of(tiny_seq2seq_lm()).keep_hidden_states()
    with pytest.raises(UnsupportedError, match=r"GPTNeoXForCausalLM has no final `norm`"):
        TargetModel(tiny_causal_lm("gpt_neox", **settings_of("gpt_neox"))).keep_hidden_states()
