"""Packages of models and kernels: without them, beside ones that do not fit, and of other people."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import random_ids, random_tree
from helpers.packages import hide_packages
from helpers.saved_models import saved
from helpers.tabled_model import TabledModel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from precedent import __version__
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


def wide(dtype: torch.dtype = torch.float32) -> Any:
    """A model whose layers the kernels for CPUs would take."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "intermediate_size": 128}
    return tiny_causal_lm(dtype=dtype, **sizes)


def texts(target: TargetModel) -> list[tuple[int, ...]]:
    with closing(Engine(target, byte_tokenizer(), name="tiny")) as engine:
        prompts = [random_ids(seed, 40) for seed in (1, 2)]
        running = [engine.submit(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
        return [one.result().token_ids for one in running]


def test_without_packages_every_module_is_torchs_own_and_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("precedent_cpu")
    with_kernels = TargetModel(wide())
    expected = texts(with_kernels)
    hide_packages(monkeypatch)
    target = TargetModel(wide())
    assert target.runner.packed
    assert not target.runner.backends
    assert {type(module).__module__.split(".")[0] for module in target.model.modules()} == {"torch", "transformers"}
    assert not any(hasattr(type(module), "swapped_from") for module in target.model.modules())
    assert texts(target) == expected


@pytest.mark.gpu
def test_on_cuda_without_packages_a_tree_is_scored_as_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own attention with a mask, one tree and several at a time."""
    hide_packages(monkeypatch)
    target, cpu = TargetModel(wide().cuda()), TargetModel(wide())
    trees = [random_tree(seed, 7) for seed in (1, 2)]
    logits = []
    for each in (target, cpu):
        slots = [each.new_slot() for _ in trees]
        for number, slot in enumerate(slots):
            each.prefill(slot, random_ids(number, 30))
        logits.append([rows.cpu() for rows in each.score(list(zip(slots, trees, strict=True)))])
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    assert texts(target) == texts(cpu)


@pytest.mark.parametrize(
    ("options", "package"),
    [({"bitwise": True}, "precedent-cpu"), ({"cuda_graphs": True}, r"precedent-llm\[cuda\]")],
    ids=["bitwise", "cuda_graphs"],
)
def test_an_option_without_its_package_says_what_to_install(
    options: dict[str, bool], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_packages(monkeypatch)
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}=True is not available: pip install '{package}'"):
        TargetModel(wide(), **options)


def test_weights_are_quantised_only_where_a_package_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, wide())
    hide_packages(monkeypatch)
    with pytest.raises(ConfigError, match="quantization='int8' is not available: pip install 'precedent-cpu'"):
        load_target(folder, device="cpu", quantization="int8")


def installed_beside(metadata: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[support.ModelSupport, ...]:
    """The supports found where a package with these requirements names one that cannot be imported."""
    written = folder / "precedent_odd-9.9.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: precedent-odd\nVersion: 9.9\n{metadata}")
    (written / "entry_points.txt").write_text("[precedent.models]\nodd = precedent_odd:SUPPORT\n")
    monkeypatch.syspath_prepend(str(folder))
    support.installed.cache_clear()
    try:
        return support.installed()
    finally:
        support.installed.cache_clear()


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ("", ["the models of precedent_odd:SUPPORT are not available: ModuleNotFoundError"]),
        (
            "Requires-Dist: numpy\nRequires-Dist: precedent-llm==9.9\n",
            [
                f"precedent-odd 9.9 is made for precedent-llm 9.9, and {__version__} is installed",
                f"pip install 'precedent-llm=={__version__}' 'precedent-odd=={__version__}'",
            ],
        ),
    ],
    ids=["not importable", "for another version"],
)
def test_a_package_that_does_not_fit_is_left_out_with_the_reason(
    metadata: str, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Models run without it: a package that only makes them faster never fails a request."""
    names = {type(each).__name__ for each in installed_beside(metadata, tmp_path, monkeypatch)}
    assert all(said in caplog.text for said in says)
    assert names >= {"CpuSupport"}


def config_of(model_type: str) -> PreTrainedConfig:
    """A tiny config of this type, which names its class as saved checkpoints do."""
    if model_type == "t5":
        config, auto = tiny_seq2seq_lm("t5").config, AutoModelForSeq2SeqLM
    else:
        config, auto = tiny_config(config_class_of(model_type)), AutoModelForCausalLM
    config.architectures = [auto._model_mapping[type(config)].__name__]
    return config


@pytest.mark.parametrize("model_type", NEEDING)
def test_a_model_says_which_package_it_needs_before_weights_are_read(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds neither weights nor a tokenizer, which are not looked for."""
    hide_packages(monkeypatch)
    config_of(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"^{NEEDING[model_type]}.*pip install 'precedent-llm\[models\]'$"):
        load_target(tmp_path)


def test_a_loaded_model_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch)
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
    with pytest.raises(UnsupportedError, match=r"draft_model='first-layers:1' shares its target's layers"):
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
