"""Token ids to text, a few at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are not (yet) a complete UTF-8 character."""

REMEMBERED = 1 << 16
"""Number of token runs whose text is cached: agents write the same words again and again."""

_Texts = dict[frozenset[int] | None, dict[tuple[int, ...], str]]
_TEXTS: WeakKeyDictionary[PreTrainedTokenizerBase, _Texts] = WeakKeyDictionary()
"""Cached texts by tokenizer and by the set of hidden tokens."""


class IncrementalDetokenizer:
    """Turns bursts of token ids into text, skipping special tokens that are not `shown`; never splits a character.

    It takes tokens one at a time, so the text, and the token at which it appears, do not depend on how the ids are cut
    into bursts. Each token is decoded together with the ids shown last, because many decoders treat the first token of
    a text differently (they strip its space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_tokens(tokenizer, shown)
        self._texts = _TEXTS.setdefault(tokenizer, {}).setdefault(self._hidden, {})
        self._shown: tuple[int, ...] = ()
        self._shown_length = 0
        self._pending: tuple[int, ...] = ()

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete; it may lag behind them."""
        return "".join(self._push_one(int(token)) for token in token_ids)

    def flush(self) -> str:
        """Return the text still held back; an unfinished character becomes U+FFFD."""
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
            text = self._texts[ids] = decoded(self._tokenizer, ids, self._hidden)
        return text


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """Ids and texts of the tokens that decoding skips as special."""
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def hidden_tokens(tokenizer: PreTrainedTokenizerBase, shown: Collection[int]) -> frozenset[int] | None:
    """The special tokens to leave out of a text; None means all of them."""
    return frozenset(special_token_ids(tokenizer)) - frozenset(shown) if shown else None


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], hidden: frozenset[int] | None) -> str:
    """Decode ids without the `hidden` tokens; None hides every special token."""
    if hidden is not None:
        ids = [token for token in ids if token not in hidden]
    text = tokenizer.decode(list(ids), skip_special_tokens=hidden is None, clean_up_tokenization_spaces=False)
    return str(text)
