"""Follows an answer through its script, token by token, however the answer was tokenized."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

from precedent.errors import GenerationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLANK = b" \t\r\n"
SPACES = (b" ", b"\n")
"""White space that may be added, once per place, if a constraint requires some."""

PUNCTUATION = b"{}[],:<>"
_GAP = re.compile(rb"(?<![ \t\r\n])[ \t\r\n]*")
_STRING = re.compile(rb'"(?:\\.|[^"\\])*(?:"|$)', re.DOTALL)

CLOSERS = (b'"', b"}", b"]")
"""The bytes that end JSON soonest, best first."""

WEIGHTS = tuple(50.0 * 2.5**rank for rank in reversed(range(9)))
"""Added to the logits of a script's wishes, first wish first; so far apart that no penalty changes their order."""


class ScriptedText:
    """One request's script: the answer that begins after `prompt_length` tokens.

    The tokenizer is byte-level. Layout, which is white space outside JSON strings and next to punctuation or a tag, may
    be left out or added, as a constraint requires; with any other difference the answer has left the script.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, answer: str) -> None:
        self._end = int(tokenizer.eos_token_id)
        self._prompt_length = prompt_length
        self._ids = (*tokenizer.encode(answer, add_special_tokens=False), self._end)
        self._pieces = pieces_of(tokenizer)
        self._tokens = {piece: token for token, piece in self._pieces.items()}
        self._longest = max(map(len, self._tokens))
        self._text = self._bytes(self._ids[:-1])
        self._layout = layout_of(self._text)

    def wishes(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens by which the script continues `token_ids` (prompt and answer so far), the literal next one first.

        Next come alternatives that a constraint may require: without layout, in smaller pieces, with white space added.
        Last come the tokens that end the answer soonest; they are the only ones once the answer has left the script.
        """
        given = tuple(token_ids[self._prompt_length :])
        said = self._bytes(given)
        at = self._place(said)
        ends = (self._end, *(self._tokens[closer] for closer in CLOSERS))
        if at is None:
            return ends
        to_the_letter = given == self._ids[: len(given)] and len(given) < len(self._ids)
        bare = self._after_layout(at)
        spaces = SPACES if self._layout[at] and said[-1:] not in SPACES else ()
        literal = self._ids[len(given)] if to_the_letter else self._token_at(self._text[at:])
        without = (self._token_at(self._text[bare:]), self._token_at(self._text[bare : bare + 1]))
        return tuple(dict.fromkeys((literal, *without, *(self._tokens[space] for space in spaces), *ends)))

    def lost(self, token_ids: Sequence[int]) -> str | None:
        """The rest of the script at the place where the answer left it or ended too soon; None if it did neither."""
        given = tuple(token_ids[self._prompt_length :])
        ended = self._end in given
        said = self._bytes(given[: given.index(self._end)] if ended else given)
        at = self._place(said)
        if at is not None and not (ended and self._after_layout(at) < len(self._text)):
            return None
        while at is None:
            said = said[:-1]
            at = self._place(said)
        return self._text[at:].decode(errors="replace")

    def _place(self, said: bytes) -> int | None:
        """The answer's position in the script, None if it has left the script."""
        at = 0
        for byte in said:
            if byte not in self._text[at : at + 1]:
                at = self._after_layout(at)
            if byte in self._text[at : at + 1]:
                at += 1
            elif byte not in BLANK or not self._layout[at]:
                return None
        return at

    def _after_layout(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in BLANK and self._layout[at]:
            at += 1
        return at

    def _token_at(self, rest: bytes) -> int:
        """The longest token that `rest` starts with; the end token if nothing is left."""
        lengths = range(min(self._longest, len(rest)), 0, -1)
        return next((self._tokens[rest[:n]] for n in lengths if rest[:n] in self._tokens), self._end)

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces.get(token, b"") for token in token_ids)


def layout_of(text: bytes) -> list[bool]:
    """For every position in a text, its end included, whether white space there is layout."""
    layout = [True] * (len(text) + 1)
    for gap in _GAP.finditer(text):
        around = (text[gap.start() - 1 : gap.start()], text[gap.end() : gap.end() + 1])
        is_layout = b"" in around or any(one in PUNCTUATION for one in around)
        layout[gap.start() : gap.end() + 1] = [is_layout] * (gap.end() + 1 - gap.start())
    for string in _STRING.finditer(text):
        layout[string.start() + 1 : string.end()] = [False] * (string.end() - string.start() - 1)
    return layout


@lru_cache(maxsize=8)
def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, bytes]:
    """The bytes of every token of a byte-level tokenizer; for control tokens, the bytes of their text."""
    byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_ids)
    return {
        token: piece.encode() if token in special else bytes(byte_of[symbol] for symbol in piece)
        for piece, token in tokenizer.get_vocab().items()
    }


def forbidden(lost: str) -> GenerationError:
    """The error of a request whose answer could not continue with `lost`."""
    return GenerationError(
        f"a grammar or another constraint forbids what the script says next, {lost[:60]!r}: change the script, or let "
        "the answer end early with may_stray=True"
    )
