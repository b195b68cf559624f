"""Outputs of chosen layers that a target keeps for drafters: those of plain forwards, however the rows were run."""

from __future__ import annotations

import copy
import random
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
from precedent.target.encoder_decoder.opening import target_of
from precedent.target.identity import identity_of
from precedent.target.prefix_pool import PrefixPool
from precedent.testing.sweep import in_float64, tiny_model
from precedent.testing.tiny_models import tiny_causal_lm, tiny_seq2seq_lm
from precedent.tree import EMPTY_TREE

MODELS = {"llama": 1e-9, "llama in float32": 1e-4, "stablelm": 1e-9, "glm4_moe": 1e-4, "qwen3_next": 1e-4}
"""Plain and fused layers, one sequence at a time, experts, states; and what float32 inside allows."""

TOLD = pytest.mark.parametrize("name", MODELS)


def model_of(name: str) -> PreTrainedModel:
    if name == "llama in float32":
        return row_model(torch.float32)
    return tiny_causal_lm(name, **settings_of(name)) if name in ("llama", "stablelm") else tiny_model(name)


class Kept:
    """A target that keeps two layers' outputs, the later one first, and an untouched copy of its model."""

    def __init__(self, name: str) -> None:
        model = model_of(name)
        self.plain: Any = copy.deepcopy(model) if name.startswith("llama in") else in_float64(copy.deepcopy(model))
        self.target, self.within = TargetModel(model), MODELS[name]
        self.numbers = (len(self.plain.base_model.layers), 1)
        self.outputs = self.target.keep_layer_outputs(self.numbers)

    def check(self, slot: Slot) -> None:
        """What is kept of every committed token equals the outputs in one plain forward."""
        found = self.outputs.of(slot.kv, 0, slot.kv.length)
        torch.testing.assert_close(found, self.expected(slot.token_ids), rtol=0, atol=self.within)

    @torch.inference_mode()
    def expected(self, token_ids: list[int]) -> torch.Tensor:
        seen: dict[int, torch.Tensor] = {}

        def note(number: int) -> Any:
            def report(layer: object, inputs: object, output: Any) -> None:
                seen[number] = output if isinstance(output, torch.Tensor) else output[0]

            return report

        layers = self.plain.base_model.layers
        handles = [layers[number - 1].register_forward_hook(note(number)) for number in self.numbers]
        self.plain.base_model(input_ids=torch.tensor([token_ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        return torch.cat([seen[number][0] for number in self.numbers], dim=-1)


@TOLD
def test_outputs_of_prompts_and_accepted_paths(name: str) -> None:
    """Pieces of a prompt, trees of several sequences in one forward, and the accepted path of each."""
    kept, choose = Kept(name), random.Random(1)
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
def test_outputs_follow_rewinds_forks_and_reused_prefixes(name: str) -> None:
    """Also what another conversation takes over, and what comes back from copies outside the model."""
    kept = Kept(name)
    target, prompt = kept.target, random_ids(4, 40)
    pool = PrefixPool(target)
    slot = pool.acquire("tenant", prompt)
    target.prefill(slot, prompt)
    pool.release("tenant", slot)
    again = pool.acquire("tenant", [*prompt, 5, 6, 7])
    target.prefill(again, [*prompt, 5, 6, 7])
    target.rewind(again, 30)
    target.prefill(again, [*prompt[:30], *random_ids(7, 12)])
    restored = target.restored(again.token_ids, again.kv.copied(again.kv.length))
    for each in (again, restored, target.fork(again, again.kv.nearest(20))):
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


def test_layers_and_final_states_are_kept_beside_each_other() -> None:
    """Each drafter reads its own; asking again for the same changes nothing, asking for others is refused."""
    target = TargetModel(tiny_causal_lm())
    before = target.kv_bytes(300)
    target.keep_hidden_states()
    outputs = target.keep_layer_outputs((1, 3))
    assert target.keep_layer_outputs((1, 3)) is outputs
    assert target.kv_bytes(300) - before == 512 * 3 * 48 * 8
    slot, hidden = prefilled(target, random_ids(1, 30)), target.runner.hidden
    assert hidden is not None
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


def test_targets_that_cannot_keep_them_say_so() -> None:
    """Forwards of fixed size, encoder-decoder models, other names of layers, and layers that are not there."""
    static = TargetModel(tiny_causal_lm(), cuda_graphs=graph_settings(arena_tokens=1024, capture=False))
    with pytest.raises(UnsupportedError, match=r"fixed size.*keep no hidden states"):
        static.keep_layer_outputs((1,))
    with pytest.raises(UnsupportedError, match="t5 is an encoder-decoder model, which keeps no hidden states"):
        target_of(tiny_seq2seq_lm()).keep_layer_outputs((1,))
    with pytest.raises(ConfigError, match=r"has the layers 1 to 3, and \[4\] were asked for"):
        TargetModel(tiny_causal_lm()).keep_layer_outputs((4,))
    with pytest.raises(UnsupportedError, match="has no `layers`"):
        TargetModel(tiny_model("gpt2")).keep_layer_outputs((1,))
