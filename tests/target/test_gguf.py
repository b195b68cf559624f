"""GGUF files as models: the same model, converted once, keyed by content; and every way in which a file can be bad."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.packages import hide_packages
from helpers.saved_models import logits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

pytest.importorskip("gguf")

from precedent.errors import ModelLoadError, PrecedentError
from precedent.target.load.loading import load_config, load_draft, load_target, load_tokenizer
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TEXT = "order 66 is  12\nno"
TOKENIZER = byte_tokenizer((("t", "h"),))


def tiny(seed: int = 0, **settings: int) -> PreTrainedModel:
    return tiny_causal_lm(seed=seed, dtype=torch.bfloat16, vocab_size=260, **settings)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "precedent" / "gguf"


@pytest.fixture
def file(tmp_path: Path, caches: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER)


def is_tiny(model: PreTrainedModel, seed: int = 0) -> bool:
    return torch.equal(logits_of(model), logits_of(tiny(seed=seed)))


def conversions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "converting" in text]


def test_a_gguf_file_is_the_model_that_was_written(
    file: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Other libraries say nothing; the bar of transformers' reader obeys none of its settings."""
    model, tokenizer = load_target(file)
    assert model.dtype == torch.bfloat16
    assert is_tiny(model)
    assert tokenizer(TEXT).input_ids == TOKENIZER(TEXT).input_ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 1024)
    assert capfd.readouterr() == ("", "")
    assert {record.name.rpartition(".")[0] for record in caplog.records} == {"precedent.target.load"}


def test_the_end_tokens_of_a_turn_and_of_a_message_are_read_with_that_of_the_text(tmp_path: Path, caches: Path) -> None:
    """A Gemma-style file ends a text with one token and a turn with another."""
    fields = {"tokenizer__ggml__eot_token_id": 97, "tokenizer__ggml__eom_token_id": 98}
    model, tokenizer = load_target(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, **fields))
    assert model.generation_config.eos_token_id == [97, 98, tokenizer.eos_token_id]


def test_it_is_converted_once_for_each_content_wherever_it_lies(
    file: Path, caches: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_target(str(file))
    load_target(file)
    (said,) = conversions(caplog)
    assert "model.gguf to bfloat16" in said
    assert str(caches) in said
    (tmp_path / "other").mkdir()
    load_target(file.rename(tmp_path / "other" / file.name))
    assert len(conversions(caplog)) == 1
    write_gguf(file, tiny(seed=1), TOKENIZER)
    assert is_tiny(load_target(file)[0], seed=1)
    assert len(conversions(caplog)) == 2


def test_a_file_without_the_ending_is_known_by_its_content_also_as_a_draft_model(file: Path) -> None:
    """As Ollama keeps them: sha256-…, without an ending."""
    file = file.rename(file.with_name("sha256-0123"))
    assert is_tiny(load_target(file)[0])
    assert is_tiny(load_draft(str(file), tiny(seed=2), TOKENIZER))


def test_quantised_weights_are_dequantised(tmp_path: Path, caches: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    file = write_gguf(tmp_path / "model.gguf", tiny(**sizes), TOKENIZER, quantised=True)
    model, _ = load_target(file)
    assert model.dtype == torch.bfloat16
    for (name, found), written in zip(model.state_dict().items(), tiny(**sizes).state_dict().values(), strict=True):
        error = (found.float() - written.float()).abs().max() / written.float().abs().max()
        assert error < 0.02, name
        assert (error > 0) == (written.dim() == 2), "matrices had eight bits"


def test_config_and_tokenizer_are_read_without_a_conversion(file: Path, caches: Path) -> None:
    assert load_config(file).num_hidden_layers == 3
    assert load_config(file).dtype == torch.bfloat16
    assert load_tokenizer(file)(TEXT).input_ids == TOKENIZER(TEXT).input_ids
    assert not caches.exists()


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3"]),
        ("gpt-2", ["a", "Ġ123"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3"]),
        ("of-the-future", ["a", "Ġ123"]),
    ],
)
def test_text_is_split_as_the_model_was_trained_or_it_is_said(
    pre: str, parts: list[str], tmp_path: Path, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, pre=pre))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 123")
    assert [part for part, _ in split] == parts
    assert any(pre in text for text in caplog.messages) == (pre == "of-the-future")


@pytest.mark.parametrize("name", ["model.gguf", "notes.txt"])
def test_a_file_that_is_no_gguf_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"something else")
    with pytest.raises(ModelLoadError, match=r"no GGUF file|is a file; give the folder"):
        load_target(file)


def test_a_folder_of_gguf_files_is_told_from_a_model_folder(file: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"give the file itself, '.*model\.gguf'"):
        load_target(file.parent)


def test_a_file_that_is_not_there_is_not_asked_of_the_hub() -> None:
    with pytest.raises(ModelLoadError, match=r"there is no file 'models/q4\.gguf'"):
        load_target("models/q4.gguf")


def refused(file: Path) -> str:
    """One clear line, and nothing left behind but a lock."""
    with pytest.raises(PrecedentError) as caught:
        load_target(file)
    left = [path for path in (file.parent / "caches").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_layers_that_nothing_here_runs_are_refused_before_the_work(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package runs every architecture that GGUF files have; here, none is installed."""
    hide_packages(monkeypatch)
    fields = {"mamba__ssm__conv_kernel": 4, "mamba__ssm__state_size": 8, "mamba__ssm__inner_size": 16}
    file = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, architecture="mamba", **fields)
    assert "linear_attention layers, which need a package: pip install" in refused(file)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architecture": "frobnicator"}, "architecture frobnicator is not supported"),
        ({"split__count": 3}, "llama-gguf-split --merge"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields: Any, says: str, tmp_path: Path, caches: Path) -> None:
    assert says in refused(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, **fields))


def test_a_missing_reader_is_named_before_the_work_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    assert "needs more packages; run: pip install -U accelerate" in refused(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny(), TOKENIZER).read_bytes()


@settings(max_examples=25)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_short_is_refused_wherever(
    share: float, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    file = folder / "model.gguf"
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "caches"))
        said = refused(file)
    assert "cut short or damaged" in said or "no GGUF file" in said


@given(at=st.integers(4, 3000), byte=st.integers(0, 255))
def test_a_damaged_header_is_one_line_or_a_model(
    at: int, byte: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Names, sizes and kinds stand there; whatever is read of them, nothing but our own errors comes out."""
    folder = tmp_path_factory.mktemp("damaged")
    file = folder / "model.gguf"
    file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    with contextlib.suppress(PrecedentError):
        assert load_config(file).model_type
