"""`bitwise=True` where bits would differ: models, layers and machines that round otherwise are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.bitwise_models import by_rows, model
from helpers.tiny_architectures import settings_of

from precedent.engine.engine import Engine
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import TargetModel
from precedent_testing.tiny_models import byte_tokenizer


def with_eager_attention(chosen: Any) -> Any:
    """The same, asked for transformers' own attention, in which no layer runs in one piece."""
    chosen.set_attn_implementation("eager")
    return chosen


@by_rows
@pytest.mark.parametrize(
    ("unfit", "reason"),
    [
        (lambda: model(torch.float64), "have no row-wise kernels on cpu in float64"),
        (lambda: model(torch.float16), "have no row-wise kernels on cpu in float16"),
        (lambda: model(num_key_value_heads=2, head_dim=24), "have no row-wise kernels"),
        (lambda: model(family="gpt2"), "have no row-wise kernels"),
        (
            lambda: model(family="gemma4_text", **settings_of("gemma4_text")),
            "3 of its 3 layers have no row-wise kernels",
        ),
        (lambda: model(family="gemma2", hidden_activation="gelu"), "3 of its 3 layers have no row-wise kernels"),
        (lambda: with_eager_attention(model()), r"it does not use our attention \(eager\)"),
    ],
)
def test_models_that_round_otherwise_are_refused_by_name(unfit: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"bitwise=True is not available for this .*{reason}"):
        TargetModel(unfit(), bitwise=True)


@by_rows
def test_a_layer_that_was_hooked_is_refused_while_running() -> None:
    """It would go through the model's own code, unnoticed, and round otherwise."""
    target = TargetModel(model(), bitwise=True)
    slot = target.new_slot()
    target.prefill(slot, [1, 2, 3])
    hook = target.model.model.layers[1].mlp.register_forward_hook(lambda *arguments: None)
    with pytest.raises(UnsupportedError, match="layer 1 was changed"):
        target.plain_step(slot)
    hook.remove()
    target.discard(slot)
    target.plain_step(slot)


@by_rows
def test_a_machine_that_rounds_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proof at load is for."""
    score = TargetModel.score

    def wrong(self: TargetModel, batch: Any) -> list[torch.Tensor]:
        rows = score(self, batch)
        return [row + 1e-2 * (len(row) > 1) for row in rows]

    monkeypatch.setattr(TargetModel, "score", wrong)
    with pytest.raises(UnsupportedError, match="round differently on this machine"):
        TargetModel(model(), bitwise=True)


def test_a_target_made_without_it_is_not_taken_for_one_with_it() -> None:
    with pytest.raises(ConfigError, match="made without bitwise=True"):
        Engine(TargetModel(model()), byte_tokenizer(), name="m", bitwise=True)
