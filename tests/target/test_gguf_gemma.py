"""Gemma's tokenizer from a GGUF file: whitespace runs, emoji, bytes and control tokens as in SentencePiece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precedent.target.load.loading import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LONGEST = 31
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

CONTROL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
WORDS = (SPACE, "a", "b", "c", "ab", f"{SPACE}a", f"{SPACE}ab", "é", "\t")


def vocabulary() -> list[tuple[str, int]]:
    """Tokens and their types, in Gemma's order: control tokens, runs of newlines and spaces, bytes, words."""
    kinds = [(token, UNKNOWN if token == "<unk>" else CONTROL) for token in CONTROL_TOKENS]
    kinds += [("\n" * length, USER_DEFINED) for length in range(1, LONGEST + 1)]
    kinds += [(" " * length, USER_DEFINED) for length in range(2, LONGEST + 1)]  # llama.cpp writes them as spaces
    kinds += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    return kinds + [(word, NORMAL) for word in WORDS]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with Gemma's kind of vocabulary, and one tensor: files without any are refused."""
    import gguf
    import numpy as np

    file = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    writer: Any = gguf.GGUFWriter(file, "gemma3")
    sizes = {"context_length": 128, "embedding_length": 16, "feed_forward_length": 16, "key_length": 16}
    for name, size in {**sizes, "block_count": 1, "head_count": 1, "head_count_kv": 1}.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    tokens = vocabulary()
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types([kind for _, kind in tokens])
    for name, token in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_space_prefix(False)
    writer.add_tensor("output_norm.weight", np.ones(16, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module", params=["file", "saved"])
def tokenizer(request: pytest.FixtureRequest, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file's tokenizer, and the same one saved and read again."""
    found = load_tokenizer(file)
    if request.param == "file":
        return found
    folder = tmp_path_factory.mktemp("saved")
    found.save_pretrained(folder)
    return load_tokenizer(folder)


def pieces(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [token.replace(SPACE, " ") for token in tokenizer.convert_ids_to_tokens(ids)]


def test_runs_are_split_as_sentencepiece_splits_them(tokenizer: Any) -> None:
    """The longest token first: of spaces, newlines, and where a word follows."""
    for length in range(2, 130):
        longest = [LONGEST] * (length // LONGEST) + [length % LONGEST] * (length % LONGEST > 0)
        assert [len(piece) for piece in pieces(tokenizer, " " * length)] == longest
        assert [len(piece) for piece in pieces(tokenizer, "\n" * length)] == longest
    assert pieces(tokenizer, "a ab") == ["a", " ab"]
    assert pieces(tokenizer, "a  ab") == ["a", "  ", "ab"]


@pytest.mark.parametrize(
    "text",
    ["a  b", f"a{' ' * 40}b", "a\n\n\n  b", "\t\tab", "😀", "é😀\x00\x7f", "a<end_of_turn>b", "<0x41>", " \n \n"],
)
def test_a_text_comes_back(text: str, tokenizer: Any) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_control_token_is_one_token_and_hidden(tokenizer: Any) -> None:
    assert pieces(tokenizer, "a<end_of_turn>") == ["a", "<end_of_turn>"]
    ids = tokenizer.encode("a<end_of_turn>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
