"""Hidden states that a target keeps for drafters: those of plain forwards, however the rows were run or reused."""

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

from precedent.errors import ConfigError, UnsupportedError
from precedent.target import Slot, TargetModel
from precedent.target.fingerprints import identity_of
from precedent.target.model import target_of
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import EMPTY_TREE
from precedent_testing.sweep import in_float64, tiny_model
from precedent_testing.tiny_models import tiny_causal_lm, tiny_seq2seq_lm

MODELS = {
    "llama": 1e-9,
    "llama in float32": 1e-4,
    "stablelm": 1e-9,
    "deepseek_v3": 1e-4,
    "glm4_moe": 1e-4,
    "qwen3_next": 1e-4,
}
"""Plain and fused layers, one sequence at a time, compressed keys, experts, states; and what float32 inside allows."""

FEW = ("llama", "llama in float32", "stablelm", "qwen3_next")
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in MODELS]
)


def model_of(name: str) -> PreTrainedModel:
    if name == "llama in float32":
        return row_model(torch.float32)
    if name in ("llama", "stablelm"):
        return tiny_causal_lm(name, **settings_of(name))
    return tiny_model(name)


class Kept:
    """A target that keeps states, and an untouched copy of its model.

    `reads` is what it keeps: `normed` or `unnormed` final states, or the outputs of two `layers`, the later one first.
    """

    def __init__(self, name: str, reads: str = "normed") -> None:
        model = model_of(name)
        self.plain: Any = copy.deepcopy(model) if name.startswith("llama in") else in_float64(copy.deepcopy(model))
        self.target, self.reads, self.within = TargetModel(model), reads, MODELS[name]
        self.numbers = (len(self.plain.base_model.layers), 1)
        self.states = (
            self.target.keep_layer_outputs(self.numbers)
            if reads == "layers"
            else self.target.keep_hidden_states(after_norm=reads == "normed")
        )

    def check(self, slot: Slot) -> None:
        """The states of every committed token equal those of one plain forward."""
        assert slot.kv.length == len(slot.token_ids)
        found = self.states.of(slot.kv, 0, slot.kv.length)
        torch.testing.assert_close(found, self.expected(slot.token_ids), rtol=0, atol=self.within)

    @torch.inference_mode()
    def expected(self, token_ids: list[int]) -> torch.Tensor:
        seen: dict[int, list[torch.Tensor]] = {}

        def note(number: int) -> Any:
            def report(module: object, inputs: Any, output: Any) -> None:
                seen[number] = [*inputs[:1], output if isinstance(output, torch.Tensor) else output[0]]

            return report

        base = self.plain.base_model
        watched = {0: base.norm} | {number: base.layers[number - 1] for number in self.numbers}
        handles = [module.register_forward_hook(note(number)) for number, module in watched.items()]
        base(input_ids=torch.tensor([token_ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        if self.reads == "layers":
            return torch.cat([seen[number][-1][0] for number in self.numbers], dim=-1)
        return seen[0][self.reads == "normed"][0]


@EVERY
@pytest.mark.parametrize("reads", ["normed", "unnormed", "layers"])
@pytest.mark.sampled(5)
def test_states_of_prompts_and_accepted_paths(name: str, reads: str) -> None:
    """Pieces of a prompt, trees of several sequences in one forward, and the accepted path of each."""
    kept, choose = Kept(name, reads), random.Random(1)
    slots = [prefilled(kept.target, random_ids(seed, count), chunk=7) for seed, count in ((1, 23), (2, 2), (3, 9))]
    for step in range(4):
        trees = [random_tree(10 * step + seed, 6, one_path=kept.target.one_path) for seed in range(3)]
        trees[step % 3] = EMPTY_TREE
        kept.target.score(list(zip(slots, trees, strict=True)))
        for slot, tree in zip(slots, trees, strict=True):
            path = tree.path_to(choose.randrange(len(tree))) if len(tree) else ()
            kept.target.commit(slot, tree, path, choose.randrange(250))
            kept.check(slot)


@EVERY
@pytest.mark.parametrize("reads", ["normed", "layers"])
@pytest.mark.sampled(3)
def test_states_follow_rewinds_forks_and_reused_prefixes(name: str, reads: str) -> None:
    """Also what another conversation takes over, and what comes back from copies outside the model."""
    kept = Kept(name, reads)
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
    restored = target.restore(again.token_ids, again.kv.copied(again.kv.length))
    for each in (slot, fork, again, restored, target.fork(again, again.kv.nearest(20))):
        kept.check(each)


@by_rows
def test_layers_still_run_together() -> None:
    """The fast way of running few rows stays, and gives the same bits as without a drafter."""
    model = row_model(torch.float32)
    plain, keeping = TargetModel(copy.deepcopy(model)), TargetModel(model)
    keeping.keep_layer_outputs((1, 2))
    fast: Any = keeping.runner.backends[0]
    prompt, tree = random_ids(1, 12), random_tree(1, 6)
    rows = [target.score([(prefilled(target, prompt), tree)])[0] for target in (plain, keeping)]
    assert torch.equal(*rows)
    assert fast.untouched()


@by_rows
def test_bitwise_states_do_not_depend_on_what_is_beside_them() -> None:
    """A row's state has the same bits in a tree and alone, with all layers in one call."""
    target, tree = TargetModel(row_model(torch.float32), bitwise=True), random_tree(1, 6)
    hidden = target.keep_hidden_states()
    assert target.runner.backends
    slot = prefilled(target, random_ids(1, 12))
    target.score([(slot, tree)])
    target.commit(slot, tree, tree.path_to(5), 7)
    plain, end = prefilled(target, [*slot.token_ids, slot.pending]), slot.kv.length
    assert torch.equal(hidden.of(slot.kv, 0, end), hidden.of(plain.kv, 0, end))


def test_layers_and_final_states_are_kept_beside_each_other_and_counted() -> None:
    """Each drafter reads its own; asking again for the same changes nothing, asking for others is refused."""
    target = TargetModel(tiny_causal_lm())
    before, row = target.kv_bytes(300), 512 * 48 * 8  # rows of a buffer, hidden size, bytes of a float64
    assert not target.keeps_hidden_states
    hidden, outputs = target.keep_hidden_states(), target.keep_layer_outputs((1, 3))
    assert (target.keep_hidden_states(), target.keep_layer_outputs((1, 3))) == (hidden, outputs)
    assert target.kv_bytes(300) - before == 3 * row
    slot = prefilled(target, random_ids(1, 300))
    assert slot.kv.nbytes == target.kv_bytes(300)
    normed = target.model.base_model.norm(outputs.of(slot.kv, 0, 29)[:, 48:])
    torch.testing.assert_close(hidden.of(slot.kv, 0, 29), normed, rtol=0, atol=1e-9)
    with pytest.raises(ConfigError, match=r"keeps the layers \(1, 3\)"):
        target.keep_layer_outputs((2,))


def test_prefixes_on_disk_tell_the_layers_apart() -> None:
    """What was kept of other layers has the same shape, and is never read in their place."""
    found = []
    for numbers in ((), (1, 2), (1, 3)):
        target = TargetModel(tiny_causal_lm())
        if numbers:
            target.keep_layer_outputs(numbers)
        found.append(identity_of(target))
    assert found[1]["stored"] == found[2]["stored"] != found[0]["stored"]
    assert found[1] != found[2]


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


def test_targets_that_cannot_keep_them_say_so() -> None:
    """Forwards of fixed size, encoder-decoder models, other names of modules, and layers that are not there."""
    static = TargetModel(tiny_causal_lm(), cuda_graphs=graph_settings(arena_tokens=1024, capture=False))
    for target, says in (
        (static, r"fixed size.*keep no hidden states"),
        (target_of(tiny_seq2seq_lm()), "t5 is an encoder-decoder model, which keeps no hidden states"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            target.keep_hidden_states()
        with pytest.raises(UnsupportedError, match=says):
            target.keep_layer_outputs((1,))
    with pytest.raises(UnsupportedError, match=r"GPTNeoXForCausalLM has no final `norm`"):
        TargetModel(tiny_causal_lm("gpt_neox", **settings_of("gpt_neox"))).keep_hidden_states()
    with pytest.raises(ConfigError, match=r"has the layers 1 to 3, and \[4\] were asked for"):
        TargetModel(tiny_causal_lm()).keep_layer_outputs((4,))
    with pytest.raises(UnsupportedError, match="has no `layers`"):
        TargetModel(tiny_model("gpt2")).keep_layer_outputs((1,))
