"""Token ids to text: the same under every split into bursts, never half a character, and nothing behind a stop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from precedent.errors import ContextOverflowError
from precedent.text.assembly import IncrementalDetokenizer, StopScanner, TextAssembler
from precedent.text.codec import CHARACTERS_PER_TOKEN, check_length
from precedent.text.prompt import render_prompt
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
CUTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)


def streamed(tokenizer: PreTrainedTokenizerBase, bursts: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(burst) for burst in bursts), detokenizer.flush()]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], cuts: Sequence[int] = ()) -> str:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return "".join(streamed(tokenizer, [ids[start:end] for start, end in pairwise(edges)]))


@given(st.text(max_size=40), CUTS)
def test_streamed_text_is_the_text_under_every_split(text: str, cuts: list[int]) -> None:
    assert text_of(BYTES, BYTES.encode(text, split_special_tokens=True), cuts) == text


@given(st.lists(st.integers(min_value=0, max_value=len(BYTES) - 1), max_size=40), CUTS)
def test_any_bytes_come_out_as_a_whole_decode_would_give_them(ids: list[int], cuts: list[int]) -> None:
    """Special tokens are not text."""
    assert text_of(BYTES, ids, cuts) == BYTES.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(min_value=0, max_value=len(PIECES) - 1), max_size=25), CUTS)
def test_the_split_does_not_matter_with_byte_fallback(ids: list[int], cuts: list[int]) -> None:
    assert text_of(PIECES, ids, cuts) == text_of(PIECES, ids, range(len(ids)))


@pytest.mark.parametrize("pieces", [["<s>", "▁Hello", "▁world"], ["<s>", "▁Hello", ",", "▁world", "▁a"]])
def test_inner_spaces_of_sentence_pieces_survive(pieces: list[str]) -> None:
    ids: Any = PIECES.convert_tokens_to_ids(pieces)
    assert text_of(PIECES, ids, range(len(ids))) == PIECES.decode(ids, skip_special_tokens=True)


def test_a_character_waits_for_its_last_byte_and_becomes_a_replacement_without_it() -> None:
    assert streamed(BYTES, [[token] for token in BYTES.encode("a€b")]) == ["a", "", "", "€", "b", ""]
    assert streamed(BYTES, [BYTES.encode("a€")[:-1]]) == ["a", "�"]


# Stop strings


def scanned(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    scanner, shown = StopScanner(stops), ""
    for part in parts:
        text, stopped = scanner.push(part)
        shown += text
        if stopped:
            assert (scanner.push("more"), scanner.flush()) == (("", True), "")
            return shown, True
    return shown + scanner.flush(), False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """The shortest prefix of the text that ends with a stop string, without the longest stop string it ends with."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


SMALL = st.text(alphabet="ab<\n", max_size=14)


@given(st.lists(st.text(alphabet="ab<\n", min_size=1, max_size=4), max_size=3), st.lists(SMALL, max_size=6))
def test_the_answer_stops_at_the_same_place_under_every_split(stops: list[str], parts: list[str]) -> None:
    assert scanned(stops, parts) == reference(stops, "".join(parts))


def test_tokens_behind_a_stop_do_not_count() -> None:
    assembler = TextAssembler(BYTES, ["x"])
    assert assembler.push(BYTES.encode("ax tail")) == ("a", 2)
    assert (assembler.stopped, assembler.flush()) == (True, "")


# Texts of far too many tokens are refused from their beginning, and no others

CONTEXT = 100


class Words:
    """A tokenizer of words and of whole runs of spaces, which notes what it encodes."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, text: str, **settings: Any) -> Sequence[str]:
        self.encoded.append(len(text))
        return text.split()


@pytest.mark.parametrize("num_words", [5 * CONTEXT, 1_000_000])
def test_a_long_text_is_refused_from_its_beginning(num_words: int) -> None:
    tokenizer: Any = Words()
    with pytest.raises(ContextOverflowError, match=f"{num_words * 5} characters and more than 100 tokens"):
        check_length(tokenizer, "word " * num_words, CONTEXT)
    assert tokenizer.encoded == [CHARACTERS_PER_TOKEN * CONTEXT]


@pytest.mark.parametrize("text", ["word " * 160, "word" * 50_000, (" " * 99 + "w") * 50, ""])
def test_a_text_that_may_fit_passes(text: str) -> None:
    tokenizer: Any = Words()
    check_length(tokenizer, text, CONTEXT)
    assert sum(tokenizer.encoded) <= 2 * len(text)


def test_prompts_are_looked_at_as_rendered() -> None:
    messages = [{"role": "user", "content": "word <|im_end|> " * 1000}]
    with pytest.raises(ContextOverflowError, match="shorten the conversation"):
        render_prompt(BYTES, messages, context_length=CONTEXT)
    assert render_prompt(BYTES, messages, context_length=10**6) == render_prompt(BYTES, messages)
