"""The contract of targets, kept by the torch target in its ways to run, and by a target without a torch model."""

from __future__ import annotations

import pytest
import torch
from helpers.tabled_model import TabledModel
from helpers.tiny_architectures import settings_of

from precedent.target import Target, TargetModel
from precedent.testing.target_contract import TargetContract
from precedent.testing.tiny_models import tiny_causal_lm


class TestTorchTargets(TargetContract):
    """Full attention, attention sinks, one sequence at a time, and single paths."""

    @pytest.fixture(scope="class", params=["llama", "gpt_oss", "eager", "bloom"])
    def target(self, request: pytest.FixtureRequest) -> Target:
        if request.param != "eager":
            return TargetModel(tiny_causal_lm(request.param, **settings_of(request.param)))
        model = tiny_causal_lm("mistral", **settings_of("mistral"))
        model.set_attn_implementation("eager")
        self.tolerance = 1e-4
        return TargetModel(model)


class TestATable(TargetContract):
    """A back end of its own, with no torch model behind it."""

    @pytest.fixture(scope="class")
    def target(self) -> Target:
        return TabledModel(lambda token_ids: torch.arange(8.0) * sum(token_ids) % 7)
