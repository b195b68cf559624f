"""Token ids to text: the same under every split into bursts, and never half a character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from precedent.text.assembly import IncrementalDetokenizer
from precedent_testing.scripted_engine import chatml_tokenizer

BYTES = chatml_tokenizer()


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with a leading space sign, single bytes as a fallback, and a decoder that strips the first space."""
    tokens = ["<s>", "</s>", "▁Hello", "▁world", "▁a", "lo", ",", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


PIECES = sentencepiece_like()


def streamed(tokenizer: PreTrainedTokenizerBase, bursts: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(burst) for burst in bursts), detokenizer.flush()]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(edges)]


CUTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)


@given(st.text(max_size=40), CUTS)
def test_streamed_text_is_the_text_under_every_split(text: str, cuts: list[int]) -> None:
    ids = BYTES.encode(text, split_special_tokens=True)
    assert "".join(streamed(BYTES, split(ids, cuts))) == text


@given(st.lists(st.integers(min_value=0, max_value=len(BYTES) - 1), max_size=40), CUTS)
def test_any_bytes_come_out_as_a_whole_decode_would_give_them(ids: list[int], cuts: list[int]) -> None:
    assert "".join(streamed(BYTES, split(ids, cuts))) == BYTES.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(min_value=0, max_value=len(PIECES) - 1), max_size=25), CUTS)
def test_the_split_does_not_matter_with_byte_fallback(ids: list[int], cuts: list[int]) -> None:
    one_by_one = "".join(streamed(PIECES, [[token] for token in ids]))
    assert "".join(streamed(PIECES, split(ids, cuts))) == one_by_one


@pytest.mark.parametrize("text", ["Hello world", "Hello, world a"])
def test_inner_spaces_of_sentence_pieces_survive(text: str) -> None:
    ids = [PIECES.convert_tokens_to_ids("<s>")]
    ids += [PIECES.convert_tokens_to_ids(piece) for piece in text.replace(",", " ,").replace(" ", " ▁").split()]
    ids = [PIECES.convert_tokens_to_ids("▁Hello") if token is None else token for token in ids]
    assert "".join(streamed(PIECES, [[token] for token in ids])) == PIECES.decode(ids, skip_special_tokens=True)


def test_a_character_waits_for_its_last_byte() -> None:
    parts = streamed(BYTES, [[token] for token in BYTES.encode("a€b")])
    assert parts == ["a", "", "", "€", "b", ""]


def test_an_unfinished_character_comes_out_at_the_end_as_a_replacement() -> None:
    assert streamed(BYTES, [BYTES.encode("a€")[:-1]]) == ["a", "�"]


def test_special_tokens_are_not_text() -> None:
    ids = [*BYTES.encode("a "), BYTES.convert_tokens_to_ids("<|im_start|>"), *BYTES.encode(" b"), BYTES.eos_token_id]
    assert "".join(streamed(BYTES, [[token] for token in ids])) == "a  b"
