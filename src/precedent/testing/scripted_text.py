"""Where an answer stands in its script, token by token, whatever tokens it was cut into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLANK = b" \t\r\n"


class ScriptedText:
    """One request's script: the answer that begins behind `prompt_length` tokens.

    The tokenizer is byte-level. White space is skipped where answer and script differ in nothing else: a constraint may
    forbid it, or ask for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, answer: str) -> None:
        self._end = int(tokenizer.eos_token_id)
        self._prompt_length = prompt_length
        self._ids = (*tokenizer.encode(answer, add_special_tokens=False), self._end)
        self._pieces = pieces_of(tokenizer)
        self._tokens = {piece: token for token, piece in self._pieces.items()}
        self._longest = max(map(len, self._tokens))
        self._text = self._bytes(self._ids[:-1])

    def next_after(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The token that follows prompt and answer `token_ids` by the script, and the one that skips white space."""
        given = tuple(token_ids[self._prompt_length :])
        rest = self._rest(self._bytes(given))
        if rest is None:
            return self._end, self._end
        follows_to_the_letter = given == self._ids[: len(given)] and len(given) < len(self._ids)
        first = self._ids[len(given)] if follows_to_the_letter else self._token_at(rest)
        return first, self._token_at(rest.lstrip(BLANK))

    def _rest(self, given: bytes) -> bytes | None:
        """What is left of the script behind `given`, None when that is not in it."""
        at = 0
        for byte in given:
            while at < len(self._text) and self._text[at] != byte and self._text[at] in BLANK:
                at += 1
            if at < len(self._text) and self._text[at] == byte:
                at += 1
            elif byte not in BLANK:
                return None
        return self._text[at:]

    def _token_at(self, rest: bytes) -> int:
        """The longest token that `rest` begins with; the end token at the end."""
        lengths = range(min(self._longest, len(rest)), 0, -1)
        return next((self._tokens[rest[:n]] for n in lengths if rest[:n] in self._tokens), self._end)

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces.get(token, b"") for token in token_ids)


@lru_cache(maxsize=8)
def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, bytes]:
    """The bytes of every token of a byte-level tokenizer; those of control tokens are their text."""
    byte_of = _byte_of_symbol()
    special = set(tokenizer.all_special_ids)
    return {
        token: piece.encode() if token in special else bytes(byte_of[symbol] for symbol in piece)
        for piece, token in tokenizer.get_vocab().items()
    }


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on, in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(symbols) == set(pre_tokenizers.ByteLevel.alphabet())
    return symbols
