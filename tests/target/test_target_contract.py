"""The contract of targets, kept by the torch target in its ways to run, and by a target without a torch model."""

from __future__ import annotations

import pytest
import torch
from helpers.tabled_model import TabledModel
from helpers.tiny_architectures import settings_of

from precedent.target import Target, TargetModel
from precedent_testing.sweep import tiny_model
from precedent_testing.target_contract import TargetContract
from precedent_testing.tiny_models import tiny_causal_lm


class TestTorchTargets(TargetContract):
    """Full attention, and windows with sinks."""

    @pytest.fixture(scope="class", params=["llama", "gpt_oss"])
    @classmethod
    def target(cls, request: pytest.FixtureRequest) -> Target:
        return TargetModel(tiny_causal_lm(request.param, **settings_of(request.param)))


class TestSinglePaths(TargetContract):
    """A model that tells positions by a key's place in the KV cache; transformers computes part of it in float32."""

    tolerance = 1e-6

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls) -> Target:
        return TargetModel(tiny_model("bloom"))


class TestOneSequenceAtATime(TargetContract):
    """Eager attention takes a tree as a mask; transformers computes its softmax in float32."""

    tolerance = 1e-4

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls) -> Target:
        model = tiny_causal_lm("mistral", **settings_of("mistral"))
        model.set_attn_implementation("eager")
        return TargetModel(model)


class TestATable(TargetContract):
    """A back end of its own, with no torch model behind it."""

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls) -> Target:
        return TabledModel(lambda token_ids: torch.arange(8.0) * sum(token_ids) % 7)
