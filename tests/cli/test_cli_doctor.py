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


def write(folder: Path, *, tokenizer: Any = None, **settings: Any) -> str:
    """A folder with a tiny model."""
    tiny_causal_lm(dtype=torch.float32, **settings).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


def only_free(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let every device have so many bytes left."""
    patch.setattr(doctor_checks, "free_bytes", lambda device: num_bytes)


def examined(*arguments: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and findings by check, and whether the model is said to be usable."""
    report = tmp_path / "report.json"
    status = precedent("doctor", *arguments, "--json", report)
    found = json.loads(report.read_text()) if report.exists() else {"findings": [], "usable": None}
    return status, {
        **{one["check"]: (one["state"], one["finding"]) for one in found["findings"]},
        "usable": found["usable"],
        "model_usable": found.get("model_usable"),
    }


def test_a_model_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "model")
    status, found = examined(model, tmp_path=tmp_path)
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


def test_the_end_tokens_and_where_each_comes_from(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    GenerationConfig(eos_token_id=[7, 258]).save_pretrained(folder)
    _, found = examined(folder, tmp_path=tmp_path)
    state, said = found["end tokens"]
    assert state == "yes"
    assert said.split("; ")[1:] == [
        "<|endoftext|> (256: name)", "<|im_end|> (258: generation_config, tokenizer, name)"
    ]  # fmt: skip
    assert said.startswith("( (7: generation_config)")


def test_the_memory_is_that_of_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "model")
    num_bytes = 4 * sum(one.numel() for one in tiny_causal_lm(dtype=torch.float32).parameters())
    per_token = 2 * 3 * 2 * 12 * 4  # keys and values, layers, heads, width, bytes
    only_free(monkeypatch, num_bytes + 2 * 1000 * per_token)
    assert "about 1,000 tokens fit" in examined(model, tmp_path=tmp_path)[1]["memory"][1]
    only_free(monkeypatch, num_bytes - 1)
    status, found = examined(model, "--draft-model", "first-layers:9", tmp_path=tmp_path)
    assert (status, found["usable"], found["model_usable"], found["memory"][0]) == (1, False, False, "no")


def test_block_fp8_is_dequantised_without_a_gpu_and_the_memory_is_that_of_the_dense_model(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    _, found = examined(str(folder), "--device", "cpu", tmp_path=tmp_path)
    assert found["quantised"][0] == "note"
    assert "fp8" in found["quantised"][1]
    assert "dequantised on cpu" in found["quantised"][1]
    assert found["memory"][0] == "yes"


def test_a_hybrid_has_keys_in_some_layers_and_states_in_others(tmp_path: Path) -> None:
    """Its memory for each token is that of its attention layers, and what it cannot do is said."""
    tiny_model("qwen3_next").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    status, found = examined(str(tmp_path / "model"), tmp_path=tmp_path)
    assert (status, found["usable"]) == (0, True)
    assert found["attention"] == ("yes", "qwen3_next: 2 × linear_attention, 2 × full_attention")
    assert "bitwise" in found["states"][1]
    assert "1 KiB per token" in found["memory"][1], "of its attention layers alone"


def test_a_model_that_cannot_be_rewound(tmp_path: Path) -> None:
    folder = tmp_path / "rwkv"
    AutoConfig.for_model("rwkv", hidden_size=16, num_hidden_layers=2, vocab_size=259).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    status, found = examined(str(folder), tmp_path=tmp_path)
    assert (status, found["usable"], found["attention"][0]) == (1, False, "no")
    assert "cannot be rewound" in found["attention"][1]


def test_a_draft_model_of_another_tokenizer_says_nothing_against_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, draft = write(tmp_path / "model"), write(tmp_path / "draft", tokenizer=byte_tokenizer((("t", "h"),)))
    arguments = (model, "--draft-model", draft)
    status, found = examined(*arguments, tmp_path=tmp_path)
    assert (status, found["usable"], found["draft model"][0]) == (1, False, "no")
    assert "does not share the target's tokenizer" in found["draft model"][1]
    assert capsys.readouterr().out.endswith(f"{model} can be used, but not with the draft model {draft}\n")
    arguments = (model, "--draft-model", model)
    assert examined(*arguments, tmp_path=tmp_path)[1]["draft model"][0] == "yes"


@pytest.mark.parametrize(
    ("spec", "state"), [("first-layers:2", "yes"), ("first-layers:3", "no"), ("first-layers:x", "no")]
)
def test_first_layers_that_there_are(spec: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "model")
    status, found = examined(model, "--draft-model", spec, tmp_path=tmp_path)
    assert (status, found["draft model"][0]) == (int(state == "no"), state)
    assert ("but not with" in capsys.readouterr().out) == (state == "no")


def test_a_base_model_that_cannot_be_asked_in_chatml_can_be_used_without_conversations(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "?": 1}, "?")), unk_token="?")
    model = write(tmp_path / "model", tokenizer=tokenizer, vocab_size=2)
    status, found = examined(model, tmp_path=tmp_path)
    assert (status, found["usable"], found["chat template"][0]) == (0, True, "no")
    assert "none: a base model, which refuses conversations; give chat_template=" in found["chat template"][1]
    assert examined(model, "--chat-template", "gemma", tmp_path=tmp_path)[1]["chat template"][0] == "yes"


def test_a_gguf_file_is_examined_without_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, tokenizer = tiny_causal_lm(vocab_size=260, dtype=torch.bfloat16), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer, tokenizer__ggml__eot_token_id=97)
    status, found = examined(str(file), tmp_path=tmp_path)
    assert (status, found["usable"], found["file"][0]) == (0, True, "note")
    assert found["chat template"] == ("yes", "the model's own")
    assert "(97: eot_token_id)" in found["end tokens"][1]
    assert "<|im_end|> (259: eos_token_id, tokenizer, name)" in found["end tokens"][1]
    assert not (tmp_path / "caches").exists()


def test_an_encoder_decoder_model_works_without_chat(tmp_path: Path) -> None:
    tiny_seq2seq_lm("bart", dtype=torch.float32).save_pretrained(tmp_path / "bart")
    byte_tokenizer().save_pretrained(tmp_path / "bart")
    status, found = examined(str(tmp_path / "bart"), tmp_path=tmp_path)
    assert (status, found["usable"], found["attention"]) == (0, True, ("yes", "bart: an encoder-decoder model"))
    assert found["context"][1] == "512 tokens for the prompt, and as many for the answer"
    assert "PrecedentLLM" in found["chat"][1]
