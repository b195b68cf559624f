"""Decoder layers in one piece: what the model's own modules compute, to the bit where nothing is approximated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.row_models import (
    BY_ROWS,
    DIM,
    MOST_ROWS,
    ONE_BY_ONE,
    PROMPT,
    fused_layers,
    model_by_rows,
    scored,
    unfused,
    wide_tree,
)

from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers
from precedent.tree import EMPTY_TREE
from precedent_cpu.fused_layer import fuse_layers
from precedent_cpu.kernel_code import LANES
from precedent_cpu.row_attention import fits
from precedent_cpu.tile_products import DEPTH

DTYPES = [torch.bfloat16, torch.float32]

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("architecture", "settings"),
    (BY_ROWS | ONE_BY_ONE).values(),
    ids=BY_ROWS | ONE_BY_ONE,
)
@pytest.mark.parametrize("sizes", [(0,), (5,), (MOST_ROWS - 1,), (0, 11, 3)], ids=str)
@pytest.mark.usefixtures("each_unit")
def test_logits_keys_and_values_are_those_of_the_modules(
    architecture: str, settings: dict[str, Any], dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """One row, a tree, the largest step, several sequences packed: as the modules one by one."""
    target = TargetModel(model_by_rows(architecture, dtype, **settings))
    assert fused_layers(target) == 3
    found = scored(target, sizes)
    unfused(target)
    expected = scored(target, sizes)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5  # the gate's exponential may round otherwise
    for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()
    if architecture not in ("qwen3", "gemma3_text"):  # whose norms of many heads are torch's own, module by module
        firsts = range(0, len(found[1]), 6)
        assert all(torch.equal(found[1][i], expected[1][i]) for i in firsts)  # keys of the first layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("each_unit")
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(dtype: torch.dtype, threads: int) -> None:
    """Each sequence alone, on one thread, gives the bits that it gives in company."""
    target, before = TargetModel(model_by_rows("qwen3", dtype, hidden_size=3 * DEPTH)), torch.get_num_threads()
    sizes = (4, 0, 9)
    try:
        torch.set_num_threads(threads)
        together, _ = scored(target, sizes)
        torch.set_num_threads(1)
        for number, size in enumerate(sizes):
            slot = target.new_slot()
            target.prefill(slot, PROMPT[: len(PROMPT) - 7 * number])
            assert torch.equal(target.score([(slot, wide_tree(size))])[0], together[number])
    finally:
        torch.set_num_threads(before)


def replace(layer: Any) -> None:
    """Put another module in a layer's place."""
    layer.mlp.up_proj = copy.deepcopy(layer.mlp.up_proj)
    layer.mlp.up_proj.weight.data *= 2


def hook(layer: Any) -> None:
    """Double what attention gives."""
    layer.self_attn.register_forward_hook(lambda module, args, output: (2 * output[0], *output[1:]))


def move(layer: Any) -> None:
    """Load other numbers into another place."""
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.clone() * 2


def change(layer: Any) -> None:
    """Other numbers in the same place."""
    layer.mlp.down_proj.weight.data *= 2


@pytest.mark.parametrize("happening", [replace, hook, move, change])
def test_what_happens_to_a_layer_later_counts(happening: Callable[[Any], None]) -> None:
    """Replaced modules, hooks and new numbers change the logits as they change the modules' own."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    before, _ = scored(target, (3,))
    happening(target.model.model.layers[1])
    found, _ = scored(target, (3,))
    unfused(target)
    expected, _ = scored(target, (3,))
    assert not torch.allclose(found[0], before[0], rtol=1e-3)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


def test_a_copy_of_a_model_stands_on_its_own() -> None:
    """A deep copy does not read the original's weights, nor after those are gone."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    expected, _ = scored(target, (3,))
    copied = TargetModel(copy.deepcopy(target.model))
    for parameter in target.model.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(scored(copied, (3,))[0][0], expected[0], rtol=1e-4, atol=1e-4)


def test_a_model_is_saved_as_it_was(tmp_path: Path) -> None:
    """Whole, by torch: what is loaded has the classes of the original, and can be a target again."""
    model = model_by_rows("llama", torch.bfloat16)
    classes = [type(module) for module in model.modules()]
    expected, _ = scored(TargetModel(model), (3,))
    TargetModel(first_layers(model, 1))  # looks at modules that were looked at before
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(module) for module in loaded.modules()] == classes
    assert torch.equal(scored(TargetModel(loaded), (3,))[0][0], expected[0])


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("granite", {"residual_multiplier": 0.2, "attention_multiplier": 0.1}),
        ("llama", {"head_dim": DIM // 2}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"hidden_size": 5 * LANES + 4}),
        ("stablelm", {"partial_rotary_factor": 0.5, "hidden_size": 4 * DIM}),
        ("olmo2", {}),
    ],
    ids=["scaled residual", "narrow heads", "another gate", "odd sizes", "partial rotary", "only norms after"],
)
def test_other_layers_keep_their_own_code(architecture: str, settings: dict[str, Any]) -> None:
    """What computes something else, or does not fit the registers, is left alone."""
    model = model_by_rows(architecture, torch.float32, **settings)
    layers = [type(layer) for layer in model.model.layers]
    TargetModel(model)
    assert not any(hasattr(module, "fused") for module in model.modules())
    assert [type(layer) for layer in model.model.layers] == layers


def test_a_layer_that_was_moved_is_looked_at_again() -> None:
    """Nothing is new in a model that stands as it was; what was replaced since is fused anew, once."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    assert fuse_layers(target.model) == 0
    move(target.model.model.layers[1])
    assert fuse_layers(target.model) == 1
    found, _ = scored(target, (3,))
    unfused(target)
    torch.testing.assert_close(found[0], scored(target, (3,))[0][0], rtol=1e-4, atol=1e-4)


def test_a_window_hides_the_same_keys_as_in_the_modules() -> None:
    """Rows that do not all see the whole prefix."""
    target = TargetModel(model_by_rows("mistral", torch.float32, sliding_window=16))
    assert fused_layers(target) == 3
    found, _ = scored(target, (4,))
    unfused(target)
    torch.testing.assert_close(found[0], scored(target, (4,))[0][0], rtol=1e-4, atol=1e-4)


def test_training_and_gradients_go_through_the_modules() -> None:
    """A model that was a target can still be trained."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    loss = target.model(input_ids=torch.tensor([PROMPT])).logits.square().mean()
    loss.backward()
    assert target.model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    slot = target.new_slot()
    target.prefill(slot, PROMPT)
    assert target.score([(slot, EMPTY_TREE)])[0].isfinite().all()
