"""Token ids to text, a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no complete UTF-8 character (yet)."""

REMEMBERED = 1 << 16
"""Runs of tokens whose text is remembered: agents write the same words again and again."""

_TEXTS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], str]] = WeakKeyDictionary()


class IncrementalDetokenizer:
    """Turns bursts of token ids into text, special tokens skipped; never hands out half a UTF-8 character.

    Tokens are taken one by one, so the text and the token at which it appears do not depend on how ids are cut into
    bursts. Each token is decoded together with the ids shown last, because many decoders treat the first token of a
    text differently (they strip its space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts = _TEXTS.setdefault(tokenizer, {})
        self._shown: tuple[int, ...] = ()
        self._shown_length = 0
        self._pending: tuple[int, ...] = ()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; it may lag behind them."""
        return "".join(self._push_one(int(token)) for token in token_ids)

    def flush(self) -> str:
        """The text still held back; an unfinished character comes out as U+FFFD."""
        return self._show(self._decode()) if self._pending else ""

    def _push_one(self, token: int) -> str:
        self._pending = (*self._pending, token)
        text = self._decode()
        if text.endswith(UNFINISHED) or len(text) <= self._shown_length:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[self._shown_length :]
        self._shown, self._pending = self._pending, ()
        self._shown_length = len(self._text_of(self._shown))
        return new

    def _decode(self) -> str:
        return self._text_of(self._shown + self._pending)

    def _text_of(self, ids: tuple[int, ...]) -> str:
        text = self._texts.get(ids)
        if text is None:
            if len(self._texts) >= REMEMBERED:
                self._texts.clear()
            decode = self._tokenizer.decode
            text = str(decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
            self._texts[ids] = text
        return text
