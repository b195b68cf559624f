"""The contract of targets, kept by recurrent and hybrid models, models with indexers and encoder-decoder models."""

from __future__ import annotations

import pytest
from helpers.hybrids import hybrid

from precedent.target import Target
from precedent.target.model import target_of
from precedent_testing.target_contract import TargetContract
from precedent_testing.tiny_models import tiny_seq2seq_lm

STATEFUL = ("qwen3_next", "falcon_h1", "mamba", "zaya", "deepseek_v32", "qwen4_exp_text")


class TestLayersWithAState(TargetContract):
    """transformers computes most of these layers in float32, whatever the model's dtype is."""

    tolerance = 1e-5

    @pytest.fixture(scope="class", params=STATEFUL)
    @classmethod
    def target(cls, request: pytest.FixtureRequest) -> Target:
        return hybrid(request.param)


class TestEncoderDecoderModels(TargetContract):
    """T5's positions are relative, BART's come from a table."""

    @pytest.fixture(scope="class", params=["t5", "bart"])
    @classmethod
    def target(cls, request: pytest.FixtureRequest) -> Target:
        return target_of(tiny_seq2seq_lm(request.param))
