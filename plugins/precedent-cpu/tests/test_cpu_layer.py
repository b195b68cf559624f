"""Decoder layers in one piece, and all of them in one call: what the model's own modules compute, one by one."""

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
    few_rows,
    fused_layers,
    model_by_rows,
    scored,
    unfused,
)
from torch import Tensor

from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers
from precedent.target.support import Backend
from precedent.tree import EMPTY_TREE
from precedent_cpu.fused_layer import fuse_layers
from precedent_cpu.kernel_code import LANES
from precedent_cpu.linear import FEW_ROWS_BESIDE_BFLOAT16
from precedent_cpu.row_attention import fits

DTYPES = [torch.bfloat16, torch.float32]
SIZES = ((0,), (5,), (MOST_ROWS - 1,), (0, 11, 3))
"""Nodes of the trees that are scored together: one row, a tree, the largest step, several sequences packed."""

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)


def as_modules(target: TargetModel, found: Tensor, size: int = 3) -> None:
    """`found` are the logits of a tree that the model's own modules give, one by one, up to rounding."""
    unfused(target)
    torch.testing.assert_close(found, scored(target, (size,))[0][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("architecture", "settings"),
    (BY_ROWS | ONE_BY_ONE).values(),
    ids=BY_ROWS | ONE_BY_ONE,
)
@pytest.mark.usefixtures("each_unit")
@pytest.mark.sampled(5)
def test_logits_keys_and_values_are_those_of_the_modules(
    architecture: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    target = TargetModel(model_by_rows(architecture, dtype, **settings))
    assert fused_layers(target) == 3
    every_found = [scored(target, sizes) for sizes in SIZES]
    unfused(target)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5  # the gate's exponential may round otherwise
    for sizes, found in zip(SIZES, every_found, strict=True):
        expected = scored(target, sizes)
        for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
            assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()
        if architecture not in ("qwen3", "gemma3_text"):  # whose norms of many heads are torch's own, module by module
            firsts = range(0, len(found[1]), 6)
            assert all(torch.equal(found[1][i], expected[1][i]) for i in firsts)  # keys of the first layer


class Counted(Backend):
    """Counts the forwards that were taken."""

    def __init__(self, inner: Backend) -> None:
        self._inner, self.taken = inner, 0

    def logits(self, forward: Any) -> Tensor | None:
        found = self._inner.logits(forward)
        self.taken += found is not None
        return found

    def fill(self, forward: Any) -> bool:
        found = self._inner.fill(forward)
        self.taken += found
        return found


def counted(target: TargetModel) -> Counted:
    """Have a target's forwards of all layers counted."""
    (backend,) = target.runner.backends
    target.runner.backends = [counter := Counted(backend)]
    return counter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "settings"), BY_ROWS.values(), ids=BY_ROWS)
@pytest.mark.usefixtures("each_unit")
@pytest.mark.sampled(5)
def test_all_layers_give_the_bits_of_one_after_the_other(
    architecture: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Logits, keys and values, prompts included."""
    target = TargetModel(model_by_rows(architecture, dtype, **settings))
    counter, taken, every_found = counted(target), 0, []
    assert few_rows(target) >= FEW_ROWS_BESIDE_BFLOAT16
    for sizes in SIZES:
        every_found.append(scored(target, sizes))
        prompts = [len(PROMPT) - 7 * number - 1 for number in range(len(sizes))]
        taken += sum(rows <= few_rows(target) for rows in (*prompts, sum(sizes) + len(sizes)))
        assert counter.taken == taken
    target.runner.backends.clear()
    for sizes, found in zip(SIZES, every_found, strict=True):
        expected = scored(target, sizes)
        assert all(map(torch.equal, [*found[0], *found[1]], [*expected[0], *expected[1]]))


def test_a_long_prompt_goes_the_models_own_way() -> None:
    """Packed products are faster for it."""
    target = TargetModel(model_by_rows("llama", torch.bfloat16))
    counter, slot = counted(target), target.new_slot()
    target.prefill(slot, PROMPT * 3)
    assert counter.taken == 0
    target.plain_step(slot)
    assert counter.taken == 1


def test_an_early_exit_runs_its_few_layers_together() -> None:
    """The target's own first layers, as a draft model, over the target's KV buffers."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    early, slot, rows = TargetModel(first_layers(target.model, 2)), target.new_slot(), []
    target.prefill(slot, PROMPT)
    for backends in (early.runner.backends, []):
        early.runner.backends = backends
        behind = early.new_slot()
        behind.kv, behind.pending = slot.kv.first_layers(2), slot.pending
        rows.append(early.score([(behind, EMPTY_TREE)])[0])
    assert torch.equal(*rows)


def doubling(output: Any) -> Any:
    """An output of a layer, a model without its head, or a whole model, changed so that the logits change."""
    if hasattr(output, "logits"):
        output.logits = output.logits * 2
    elif hasattr(output, "last_hidden_state"):
        output.last_hidden_state = output.last_hidden_state.flip(-1)
    elif isinstance(output, tuple):
        return (2 * output[0], *output[1:])
    else:
        return output.flip(-1)
    return output


def hook(name: str) -> Callable[[Any], object]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda module, args, out: doubling(out))


def replace(parent: str, name: str) -> Callable[[Any], None]:
    """Put another module in the place of one."""

    def happen(model: Any) -> None:
        other = copy.deepcopy(model.get_submodule(f"{parent}.{name}".strip(".")))
        for weight in other.parameters():
            weight.data = weight.data.flip(0) * 2
        model.get_submodule(parent).register_module(name, other)

    return happen


def override(model: Any) -> None:
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs) * 2


def move(model: Any) -> None:
    """Load other numbers into another place."""
    query = model.model.layers[1].self_attn.q_proj
    query.weight.data = query.weight.data.clone() * 2


def change(model: Any) -> None:
    """Other numbers in the same place."""
    model.model.layers[1].mlp.down_proj.weight.data *= 2


@pytest.mark.parametrize(
    "happening",
    [
        *(hook(name) for name in ("model.layers.1.self_attn", "model.layers.1", "model.norm", "model", "")),
        replace("model.layers.1.mlp", "up_proj"), replace("model.layers", "1"), replace("", "lm_head"),
        override, move, change,
    ],
)  # fmt: skip
def test_what_happens_to_a_model_later_counts(happening: Callable[[Any], object]) -> None:
    """Hooks, replaced modules, methods and new numbers change the logits as they change the model's own."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    before, _ = scored(target, (3,))
    happening(target.model)
    found, _ = scored(target, (3,))
    assert not torch.allclose(found[0], before[0], rtol=1e-3)
    target.runner.backends.clear()
    as_modules(target, found[0])


def test_a_model_that_is_hooked_at_load_is_not_believed_untried() -> None:
    """What a hook hides from the comparison may not be used once the hook is gone."""
    settings = {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 2.0}
    model = model_by_rows("granite", torch.float32, **settings)
    timing = model.model.register_forward_hook(lambda module, args, output: None)
    target = TargetModel(model)
    timing.remove()
    as_modules(target, scored(target, (3,))[0][0])


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
    assert not TargetModel(model).runner.backends
    assert not any(hasattr(module, "fused") for module in model.modules())
    assert [type(layer) for layer in model.model.layers] == layers


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("granite", {"residual_multiplier": 1.0, "embedding_multiplier": 3.0, "logits_scaling": 1.0}),
        ("granite", {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 2.0}),
        ("mistral", {"sliding_window": 16}),
    ],
    ids=["scaled embeddings", "scaled logits", "a window"],
)
def test_layers_with_anything_else_around_them_run_one_by_one(architecture: str, settings: dict[str, Any]) -> None:
    target = TargetModel(model_by_rows(architecture, torch.float32, **settings))
    assert fused_layers(target) == 3
    assert not target.runner.backends
    as_modules(target, scored(target, (4,))[0][0], size=4)


def test_a_layer_that_was_moved_is_looked_at_again() -> None:
    """Nothing is new in a model that stands as it was; what was replaced since is fused anew, once."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    assert fuse_layers(target.model) == 0
    move(target.model)
    assert fuse_layers(target.model) == 1
    as_modules(target, scored(target, (3,))[0][0])


def test_training_and_gradients_go_through_the_modules() -> None:
    """A model that was a target can still be trained."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    loss = target.model(input_ids=torch.tensor([PROMPT])).logits.square().mean()
    loss.backward()
    assert target.model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    slot = target.new_slot()
    target.prefill(slot, PROMPT)
    assert target.score([(slot, EMPTY_TREE)])[0].isfinite().all()
