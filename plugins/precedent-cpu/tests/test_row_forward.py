"""All layers in one call: the bits of one layer after the other, and only where nothing else stands around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.row_models import BY_ROWS, DIM, MOST_ROWS, PROMPT, few_rows, model_by_rows, scored, unfused
from torch import Tensor

from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers
from precedent.target.runner import Backend
from precedent.tree import EMPTY_TREE
from precedent_cpu.linear import FEW_ROWS_BESIDE_BFLOAT16
from precedent_cpu.row_attention import fits

DTYPES = [torch.bfloat16, torch.float32]

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)


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
    runner = target.runner
    (backend,) = runner.backends
    runner.backends = [counter := Counted(backend)]
    return counter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("architecture", "settings"),
    BY_ROWS.values(),
    ids=BY_ROWS,
)
@pytest.mark.parametrize("sizes", [(0,), (5,), (MOST_ROWS - 1,), (0, 11, 3)], ids=str)
@pytest.mark.usefixtures("each_unit")
def test_it_gives_the_bits_of_one_layer_after_the_other(
    architecture: str, settings: dict[str, Any], dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """Logits, keys and values, prompts included, of one row, a tree, the largest step, several sequences packed."""
    target = TargetModel(model_by_rows(architecture, dtype, **settings))
    counter = counted(target)
    found = scored(target, sizes)
    assert few_rows(target) >= FEW_ROWS_BESIDE_BFLOAT16
    prompts = [len(PROMPT) - 7 * number - 1 for number in range(len(sizes))]
    assert counter.taken == sum(rows <= few_rows(target) for rows in (*prompts, sum(sizes) + len(sizes)))
    target.runner.backends.clear()
    expected = scored(target, sizes)
    assert all(map(torch.equal, [*found[0], *found[1]], [*expected[0], *expected[1]]))


def test_a_long_prompt_and_too_many_rows_go_the_models_own_way() -> None:
    """Packed products are faster for those."""
    target = TargetModel(model_by_rows("llama", torch.bfloat16))
    counter, slot = counted(target), target.new_slot()
    target.prefill(slot, PROMPT * 3)
    assert counter.taken == 0
    target.plain_step(slot)
    assert counter.taken == 1


def test_an_early_exit_runs_its_few_layers_together() -> None:
    """The target's own first layers, as a draft model, over the target's KV buffers."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    early = TargetModel(first_layers(target.model, 2))
    slot = target.new_slot()
    target.prefill(slot, PROMPT)
    rows = []
    for backends in (early.runner.backends, []):
        early.runner.backends = backends
        behind = early.new_slot()
        behind.kv, behind.pending = slot.kv.first_layers(2), slot.pending
        rows.append(early.score([(behind, EMPTY_TREE)])[0])
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("granite", {"residual_multiplier": 1.0, "embedding_multiplier": 3.0, "logits_scaling": 1.0}),
        ("granite", {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 2.0}),
        ("mistral", {"sliding_window": 512}),
        ("llama", {"head_dim": DIM // 2}),
        ("llama", {"hidden_size": 64, "intermediate_size": 100}),
    ],
    ids=["scaled embeddings", "scaled logits", "a window", "narrow heads", "odd sizes"],
)
def test_a_model_with_anything_else_around_its_layers_is_left_alone(
    architecture: str, settings: dict[str, Any]
) -> None:
    """Its layers may still run in one piece each."""
    target = TargetModel(model_by_rows(architecture, torch.float32, **settings))
    assert not target.runner.backends


def hook_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)


def hook_base(model: Any) -> None:
    def doubled(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flip(-1)
        return output

    model.model.register_forward_hook(doubled)


def hook_whole(model: Any) -> None:
    def doubled(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(doubled)


def hook_norm(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output.flip(-1))


def replace_layer(model: Any) -> None:
    layer = copy.deepcopy(model.model.layers[1])
    layer.mlp.down_proj.weight.data *= 2
    model.model.layers[1] = layer


def replace_head(model: Any) -> None:
    head = copy.deepcopy(model.lm_head)
    head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
    model.lm_head = head


def override(model: Any) -> None:
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs) * 2


@pytest.mark.parametrize(
    "happening", [hook_layer, hook_base, hook_whole, hook_norm, replace_layer, replace_head, override]
)
def test_what_happens_to_a_model_later_counts(happening: Callable[[Any], None]) -> None:
    """Hooks, replaced modules and methods change the logits as they change the model's own."""
    target = TargetModel(model_by_rows("llama", torch.float32))
    before, _ = scored(target, (3,))
    happening(target.model)
    found, _ = scored(target, (3,))
    target.runner.backends.clear()
    unfused(target)
    expected, _ = scored(target, (3,))
    assert not torch.allclose(found[0], before[0], rtol=1e-3)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_is_hooked_at_load_is_not_believed_untried() -> None:
    """What a hook hides from the comparison may not be used once the hook is gone."""
    settings = {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 2.0}
    model = model_by_rows("granite", torch.float32, **settings)
    timing = model.model.register_forward_hook(lambda module, args, output: None)
    target = TargetModel(model)
    timing.remove()
    found, _ = scored(target, (3,))
    unfused(target)
    torch.testing.assert_close(found[0], scored(target, (3,))[0][0], rtol=1e-4, atol=1e-4)


def test_what_the_embeddings_gave_stays_as_it_was() -> None:
    """Somebody may look at it by a hook; and rows of another dtype go the model's own way, which refuses them."""
    target, seen = TargetModel(model_by_rows("llama", torch.bfloat16)), list[Tensor]()
    target.model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(output))
    scored(target, (3,))
    rows = target.model.model.embed_tokens.weight
    assert all(any(torch.equal(row, known) for known in rows) for row in seen[-1][0])
    target.model.model.embed_tokens.float()
    with pytest.raises(RuntimeError):
        scored(target, (3,))
