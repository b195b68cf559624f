"""Tokenizers of a service: transformers' own, or a tokenizer.json that is read without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precedent.errors import ConfigError, ModelLoadError
from precedent_engines.tokenizer import codec_of
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_testing.tiny_models import byte_tokenizer

TEXTS = ("", "The order was sent.", ' {"a": 1}\n', "ünï 𝄞\x00", "<|im_end|> no", "  two  spaces ")


@pytest.mark.parametrize("make", [scripted_tokenizer, byte_tokenizer])
@pytest.mark.parametrize("as_file", [True, False])
def test_a_file_reads_as_the_tokenizer_that_wrote_it(make: Any, as_file: bool, tmp_path: Path) -> None:
    """The same fingerprint, the same ids, the same texts and the same end: so the store is the same."""
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    (read, number), (own, whole) = codec_of(tmp_path / "tokenizer.json" if as_file else tmp_path), codec_of(tokenizer)
    assert (read.fingerprint, number, read.end_token_id) == (own.fingerprint, whole, own.end_token_id)
    for text in TEXTS:
        ids = own.encode(text)
        assert read.encode(text) == ids
        assert read.decode(ids) == own.decode(ids)
    assert read.longest_token == own.longest_token


def test_without_settings_beside_it_no_token_is_known_to_end_an_answer(tmp_path: Path) -> None:
    scripted_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert codec_of(tmp_path)[0].end_token_id is None


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no .*tokenizer\.json"):
        codec_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"there is no .*other\.json"):
        codec_of(tmp_path / "other.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        codec_of(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"cannot be fetched from the hub.*hf download some/model"):
        codec_of("some/model")
    with pytest.raises(ConfigError, match="a list is no tokenizer"):
        codec_of([1, 2])  # type: ignore[arg-type]
