"""`precedent doctor`: what it finds in the files of a model; loading refuses what it finds missing."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.packed_checkpoints import write_packed
from helpers.saved_models import assert_one_clear_line, saved
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, RwkvConfig

from precedent.cli import doctor_checks
from precedent.errors import ModelLoadError
from precedent.target.load.loading import load_target
from precedent_testing.sweep import tiny_model
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm, tiny_seq2seq_lm


def write(folder: Path, *, model: Any = None, tokenizer: Any = None) -> str:
    """A folder with a tiny model, or with a config alone."""
    (model or tiny_causal_lm(dtype=torch.float32)).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def examined(tmp_path: Path) -> Any:
    """Examines a model; returns exit status and findings by check, and whether the model is said to be usable."""
    report = tmp_path / "report.json"

    def examine(*arguments: object) -> tuple[int, dict[str, Any]]:
        status = precedent("doctor", *arguments, "--json", report)
        found = json.loads(report.read_text())
        findings = {one["check"]: (one["state"], one["finding"]) for one in found["findings"]}
        return status, findings | {"usable": found["usable"], "model_usable": found["model_usable"]}

    return examine


def test_a_model_that_works(model: str, examined: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(model)
    assert (status, found["usable"]) == (0, True)
    assert found["attention"] == ("yes", "llama: 3 × full_attention")
    assert found["context"][1].startswith("1,024 tokens")
    assert found["tools"][0] == "yes"
    assert "shipped template" in found["tools"][1], "its own template knows no tools"
    assert found["tools"][1].endswith("hermes")
    assert found["structured output"][0] == "yes"
    assert found["reasoning"] == ("note", "none")
    assert found["draft model"][0] == "note"
    assert "can be used" in capsys.readouterr().out


def test_the_end_tokens_and_where_each_comes_from(tmp_path: Path, examined: Any) -> None:
    folder = write(tmp_path / "model")
    GenerationConfig(eos_token_id=[7, 258]).save_pretrained(folder)
    state, said = examined(folder)[1]["end tokens"]
    assert state == "yes"
    assert said.startswith("( (7: generation_config)")
    others = "<|endoftext|> (256: name)", "<|im_end|> (258: generation_config, tokenizer, name)"
    assert said.split("; ")[1:] == [*others]


def test_the_memory_is_that_of_the_real_model(model: str, examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 4 * sum(one.numel() for one in tiny_causal_lm(dtype=torch.float32).parameters())
    per_token = 2 * 3 * 2 * 12 * 4  # keys and values, layers, heads, width, bytes
    for free, room in ((num_bytes + 2 * 1000 * per_token, True), (num_bytes - 1, False)):
        monkeypatch.setattr(doctor_checks, "free_bytes", lambda device, free=free: free)
        status, found = examined(model, "--draft-model", "first-layers:9")
        assert (status, found["usable"], found["model_usable"]) == (1, False, room)
        assert found["memory"][0] == ("yes" if room else "no")
        assert ("about 1,000 tokens fit" in found["memory"][1]) is room


def test_block_fp8_is_dequantised_without_a_gpu_and_the_memory_is_that_of_the_dense_model(
    tmp_path: Path, examined: Any
) -> None:
    folder = Path(write(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    _, found = examined(folder, "--device", "cpu")
    assert found["quantised"][0] == "note"
    assert "stored in fp8, and dequantised on cpu" in found["quantised"][1]
    assert found["memory"][0] == "yes"


def test_a_hybrid_has_keys_in_some_layers_and_states_in_others(tmp_path: Path, examined: Any) -> None:
    """Its memory for each token is that of its attention layers, and what it cannot do is said."""
    pytest.importorskip("precedent_models")
    status, found = examined(write(tmp_path / "model", model=tiny_model("qwen3_next")))
    assert (status, found["usable"]) == (0, True)
    assert found["attention"] == ("yes", "qwen3_next: 2 × linear_attention, 2 × full_attention")
    assert "bitwise" in found["states"][1]
    assert "1 KiB per token" in found["memory"][1], "two layers of float64"


def test_a_base_model_that_cannot_be_asked_in_chatml_can_be_used_without_conversations(
    tmp_path: Path, examined: Any
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "?": 1}, "?")), unk_token="?")
    model = write(tmp_path / "model", model=tiny_causal_lm(dtype=torch.float32, vocab_size=2), tokenizer=tokenizer)
    status, found = examined(model)
    assert (status, found["usable"], found["chat template"][0]) == (0, True, "no")
    assert "none: a base model, which refuses conversations; give chat_template=" in found["chat template"][1]
    assert examined(model, "--chat-template", "gemma")[1]["chat template"][0] == "yes"


def test_a_base_model_and_one_without_an_end_token_are_called_so(tmp_path: Path, examined: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    state, said = examined(write(tmp_path / "base", tokenizer=tokenizer))[1]["chat template"]
    assert (state, "a base model, not trained to chat" in said) == ("note", True)
    tokenizer.eos_token = None
    folder = Path(write(tmp_path / "model", tokenizer=tokenizer))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|im_end|>", "<|other|>").replace("<|endoftext|>", "<|pad|>"))
    state, said = examined(folder)[1]["end tokens"]
    assert (state, "stop=" in said) == ("no", True)


def test_a_model_that_cannot_be_rewound_cannot_be_used(tmp_path: Path, examined: Any) -> None:
    saved(tmp_path / "model", RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=259))
    status, found = examined(tmp_path / "model")
    assert (status, found["usable"], found["attention"][0]) == (1, False, "no")
    assert "cannot be rewound" in found["attention"][1]


def test_a_draft_model_is_examined_and_says_nothing_against_its_target(
    model: str, tmp_path: Path, examined: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "draft", tokenizer=byte_tokenizer((("t", "h"),)))
    for draft, state, says in (
        ("first-layers:2", "yes", "the target's own first layers, "),
        (model, "yes", "it has the target's tokenizer"),
        ("first-layers:3", "no", "first-layers:3"),
        (other, "no", "does not share the target's tokenizer"),
    ):
        status, found = examined(model, "--draft-model", draft)
        assert (status, found["draft model"][0], found["model_usable"]) == (int(state == "no"), state, True)
        assert says in found["draft model"][1]
    assert capsys.readouterr().out.endswith(f"{model} can be used, but not with the draft model {other}\n")


def test_a_gguf_file_is_examined_by_its_header(tmp_path: Path, examined: Any) -> None:
    """Each type of tensors is named, with what becomes of it; nothing is written."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    tiny, tokenizer = tiny_causal_lm(vocab_size=260, dtype=torch.float32, **sizes), byte_tokenizer((("t", "h"),))
    kinds = {"ffn_down": "Q6_K", "attn_v": "TQ2_0", "": "Q8_0"}
    file = write_gguf(tmp_path / "model.gguf", tiny, tokenizer, kind=kinds, tokenizer__ggml__eot_token_id=97)
    status, found = examined(file)
    assert (status, found["usable"], found["file"][0]) == (0, True, "note")
    assert found["type Q6_K"][1] == "2 tensors of 0.000 GB: run as stored"
    assert found["type Q8_0"][1] == "12 tensors of 0.001 GB: run as stored"
    assert found["type TQ2_0"][1] == "2 tensors of 0.000 GB: ordinary weights of 0.000 GB on cpu"
    assert found["type F32"][1].startswith("5 tensors")
    assert "weights 0.00 GB" in found["memory"][1]
    assert found["chat template"] == ("yes", "the model's own")
    assert "(97: eot_token_id)" in found["end tokens"][1]
    assert "<|im_end|> (259: eos_token_id, tokenizer, name)" in found["end tokens"][1]
    assert {path.suffix for path in tmp_path.iterdir()} == {".gguf", ".json"}


def test_a_quantised_checkpoint_that_is_read_as_stored_needs_no_package(tmp_path: Path, examined: Any) -> None:
    write_packed(tmp_path / "model", "awq")
    status, found = examined(tmp_path / "model", "--device", "cpu")
    assert (status, found["usable"]) == (0, True)
    assert found["quantised"] == ("note", "awq: run as stored, without its package")


def test_so_does_one_that_was_downloaded(tmp_path: Path, examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "models--me--mine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    write_packed(repository / "snapshots/abc", "awq")
    status, found = examined("me/mine", "--device", "cpu")
    assert (status, found["quantised"]) == (0, ("note", "awq: run as stored, without its package"))


def test_an_encoder_decoder_model_works_without_chat(tmp_path: Path, examined: Any) -> None:
    pytest.importorskip("precedent_models")
    status, found = examined(write(tmp_path / "bart", model=tiny_seq2seq_lm("bart", dtype=torch.float32)))
    assert (status, found["usable"], found["attention"]) == (0, True, ("yes", "bart: an encoder-decoder model"))
    assert found["context"][1] == "512 tokens for the prompt, and as many for the answer"
    assert "PrecedentLLM" in found["chat"][1]


# `precedent doctor` and loading agree on a model's weight files: what one finds, the other refuses

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 590736\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several files, with their index."""
    tiny_causal_lm(dtype=torch.float32).save_pretrained(tmp_path / "model", max_shard_size="200KB")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    assert len(shards(tmp_path / "model")) > 1
    return tmp_path / "model"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def with_a_damaged_header(folder: Path) -> None:
    content = bytearray(shards(folder)[0].read_bytes())
    content[8] = 0
    shards(folder)[0].write_bytes(bytes(content))


def with_a_tensor_elsewhere(folder: Path) -> None:
    weights = load_file(shards(folder)[0])
    weights.pop(min(weights))
    save_file(weights, shards(folder)[0], metadata={"format": "pt"})


def without_weights(folder: Path) -> None:
    for file in (*shards(folder), folder / "model.safetensors.index.json"):
        file.unlink()


def under_other_names(folder: Path) -> None:
    without_weights(folder)
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")


def configured(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda folder: shards(folder)[0].unlink(), "names model-00001"),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": []}'),
        "cannot be read as an index of tensors",
    ),
    "a pointer": (lambda folder: shards(folder)[-1].write_text(POINTER), "pointer of git LFS"),
    "a short file": (
        lambda folder: shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:-1000]),
        "is cut short or damaged",
    ),
    "a damaged header": (with_a_damaged_header, "is cut short or damaged"),
    "a tensor elsewhere": (with_a_tensor_elsewhere, "does not hold it"),
    "no weights": (without_weights, "holds no weights"),
    "other names": (under_other_names, "consolidated.safetensors is not one that transformers looks for"),
    "too few layers": (
        lambda folder: configured(folder, num_hidden_layers=4),
        "the config has 4 layers and the weights",
    ),
    "layers that would be left out": (lambda folder: configured(folder, num_hidden_layers=2), "more layers than"),
    "a config that is cut": (lambda folder: (folder / "config.json").write_text("{oops"), "cannot load the"),
    "an unknown architecture": (lambda folder: configured(folder, model_type="nonesuch"), "nonesuch"),
}


def diagnosed(folder: Path) -> tuple[int, list[str]]:
    """Exit status of the doctor, and what it says where something needed is missing."""
    report = folder.with_name("report.json")
    status = precedent("doctor", folder, "--json", report)
    findings = json.loads(report.read_text())["findings"]
    return status, [one["finding"] for one in findings if one["state"] == "no" and one["needed"]]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_the_doctor_and_refused_at_load(fault: str, folder: Path) -> None:
    spoil, said = FAULTS[fault]
    spoil(folder)
    status, findings = diagnosed(folder)
    assert status == 1
    assert any(said in finding for finding in findings)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_target(folder)
    assert_one_clear_line(caught.value)


@pytest.mark.parametrize("share", [0.1, 0.99])
def test_so_is_a_gguf_file_that_is_cut_short(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, tokenizer = tiny_causal_lm(vocab_size=260, dtype=torch.float32), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    status, (finding,) = diagnosed(file)
    assert status == 1
    assert "download it again" in finding
    file.write_text(POINTER)
    assert diagnosed(file)[0] == 1


def test_a_missing_package_of_the_quantiser_is_named(folder: Path) -> None:
    if importlib.util.find_spec("hqq") is not None:
        pytest.skip("the package is installed")
    configured(folder, quantization_config={"quant_method": "hqq"})
    status, findings = diagnosed(folder)
    assert status == 1
    assert any("pip install hqq" in finding for finding in findings)


def test_an_error_of_transformers_is_shown_whole(folder: Path) -> None:
    """Its first line ends before it says anything."""
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="sentencepiece or tiktoken") as caught:
        load_target(folder)
    assert_one_clear_line(caught.value)
