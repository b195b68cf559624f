"""`precedent doctor`: what it finds in a model's files, and the status with which it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from precedent.cli import doctor_checks
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
    status, found = examined(write(tmp_path / "model", model=tiny_model("qwen3_next")))
    assert (status, found["usable"]) == (0, True)
    assert found["attention"] == ("yes", "qwen3_next: 2 × linear_attention, 2 × full_attention")
    assert "bitwise" in found["states"][1]
    assert "1 KiB per token" in found["memory"][1], "two layers of float64"


def test_a_model_that_cannot_be_rewound(tmp_path: Path, examined: Any) -> None:
    config = AutoConfig.for_model("rwkv", hidden_size=16, num_hidden_layers=2, vocab_size=259)
    status, found = examined(write(tmp_path / "rwkv", model=config))
    assert (status, found["usable"], found["attention"][0]) == (1, False, "no")
    assert "cannot be rewound" in found["attention"][1]


@pytest.mark.parametrize(
    ("draft", "state", "said"),
    [
        ("first-layers:2", "yes", "the target's own first layers, 2 of 3"),
        ("first-layers:3", "no", "3"),
        ("first-layers:x", "no", "x"),
        ("another", "no", "does not share the target's tokenizer"),
        ("itself", "yes", "it has the target's tokenizer"),
    ],
)
def test_a_draft_model_that_does_not_fit_says_nothing_against_the_target(
    draft: str, state: str, said: str, model: str, examined: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if draft == "another":
        draft = write(tmp_path / "draft", tokenizer=byte_tokenizer((("t", "h"),)))
    draft = model if draft == "itself" else draft
    status, found = examined(model, "--draft-model", draft)
    assert (status, found["usable"], found["model_usable"]) == (int(state == "no"), state == "yes", True)
    assert found["draft model"][0] == state
    assert said in found["draft model"][1]
    not_with = f"{model} can be used, but not with the draft model {draft}\n"
    assert capsys.readouterr().out.endswith(not_with) == (state == "no")


def test_a_base_model_that_cannot_be_asked_in_chatml_can_be_used_without_conversations(
    tmp_path: Path, examined: Any
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "?": 1}, "?")), unk_token="?")
    model = write(tmp_path / "model", model=tiny_causal_lm(dtype=torch.float32, vocab_size=2), tokenizer=tokenizer)
    status, found = examined(model)
    assert (status, found["usable"], found["chat template"][0]) == (0, True, "no")
    assert "none: a base model, which refuses conversations; give chat_template=" in found["chat template"][1]
    assert examined(model, "--chat-template", "gemma")[1]["chat template"][0] == "yes"


def test_a_gguf_file_is_examined_by_its_header(tmp_path: Path, examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    tiny, tokenizer = tiny_causal_lm(vocab_size=260, dtype=torch.bfloat16), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "model.gguf", tiny, tokenizer, tokenizer__ggml__eot_token_id=97)
    status, found = examined(file)
    assert (status, found["usable"], found["file"][0]) == (0, True, "note")
    assert found["chat template"] == ("yes", "the model's own")
    assert "(97: eot_token_id)" in found["end tokens"][1]
    assert "<|im_end|> (259: eos_token_id, tokenizer, name)" in found["end tokens"][1]
    assert not (tmp_path / "caches").exists()


def test_an_encoder_decoder_model_works_without_chat(tmp_path: Path, examined: Any) -> None:
    status, found = examined(write(tmp_path / "bart", model=tiny_seq2seq_lm("bart", dtype=torch.float32)))
    assert (status, found["usable"], found["attention"]) == (0, True, ("yes", "bart: an encoder-decoder model"))
    assert found["context"][1] == "512 tokens for the prompt, and as many for the answer"
    assert "PrecedentLLM" in found["chat"][1]
