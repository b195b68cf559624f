"""Models that need a package, where it is not installed; packages of other people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tabled_model import TabledModel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import Target, TargetModel, support
from precedent.target.load.loading import load_target
from precedent.target.model import target_of
from precedent.target.support import LayerState, ModelSource, ModelSupport, TargetOptions
from precedent_testing.sweep import config_class_of, tiny_model
from precedent_testing.tiny_configs import tiny_config
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm, tiny_seq2seq_lm

NEEDING = {
    "mamba": "MambaForCausalLM has linear_attention layers",
    "qwen3_next": "Qwen3NextForCausalLM has linear_attention layers",
    "falcon_h1": "FalconH1ForCausalLM has hybrid layers",
    "deepseek_v32": "DeepseekV32ForCausalLM has indexed_attention layers",
    "t5": "T5ForConditionalGeneration is an encoder-decoder model",
}


def config_of(model_type: str) -> PreTrainedConfig:
    """A tiny config of this type, which names its class as saved checkpoints do."""
    if model_type == "t5":
        config, auto = tiny_seq2seq_lm("t5").config, AutoModelForSeq2SeqLM
    else:
        config, auto = tiny_config(config_class_of(model_type)), AutoModelForCausalLM
    config.architectures = [auto._model_mapping[type(config)].__name__]
    return config


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of the group is installed."""
    monkeypatch.setattr("precedent.target.support.installed", lambda: ())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("model_type", NEEDING)
def test_a_model_says_which_package_it_needs_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    """The folder holds neither weights nor a tokenizer, which are not looked for."""
    config_of(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"^{NEEDING[model_type]}.*pip install 'precedent-llm\[models\]'$"):
        load_target(tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_loaded_model_says_it_too() -> None:
    for model in (tiny_model("mamba"), tiny_seq2seq_lm()):
        with pytest.raises(UnsupportedError, match=r"precedent-llm\[models\]"):
            target_of(model)


class Mine(ModelSupport):
    """A back end of another package, for one folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.target = place, TabledModel(lambda token_ids: torch.eye(300)[7])
        self.target.vocab_size = 300

    def recognises(self, source: ModelSource, options: TargetOptions) -> bool:
        if source.place is None or Path(source.place) != self.place:
            return False
        if options.bitwise:
            raise UnsupportedError("this back end does not round alike: leave bitwise out")
        return True

    def load(self, source: ModelSource, options: TargetOptions) -> Target:
        return self.target


def test_an_engine_runs_a_target_that_a_package_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no torch model and there are no weights; drafts that would share its modules are refused by name."""
    package = Mine(tmp_path)
    monkeypatch.setattr("precedent.target.support.installed", lambda: (package,))
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine.load(str(tmp_path))
    try:
        assert engine.target is package.target
        assert engine.submit([5, 6, 7], SamplingParams(max_tokens=4)).result().token_ids == (7,) * 4
    finally:
        engine.close()
    with pytest.raises(UnsupportedError, match="leave bitwise out"):
        Engine.load(str(tmp_path), bitwise=True)
    with pytest.raises(UnsupportedError, match=r"draft_model='first-layers:1' needs a target that transformers loads"):
        Engine.load(str(tmp_path), draft_model="first-layers:1")
    with pytest.raises(UnsupportedError, match="keeps no hidden states"):
        package.target.keep_hidden_states()
    with pytest.raises(ConfigError, match="does not round a row the same way"):
        Engine(package.target, byte_tokenizer(), name="mine", bitwise=True)


def test_a_package_says_why_rows_of_its_layers_cannot_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is the one that users read, whatever package has kernels for the device."""

    class Rounding(LayerState):
        why_irregular = "its abacus slips"

    class Abacus(ModelSupport):
        def layer_state(self, config: Any) -> LayerState:
            return Rounding()

    packages = (*support.installed(), Abacus())
    monkeypatch.setattr("precedent.target.support.installed", lambda: packages)
    with pytest.raises(UnsupportedError, match="bitwise=True is not available for this llama: its abacus slips"):
        TargetModel(tiny_causal_lm(dtype=torch.float32), bitwise=True)
