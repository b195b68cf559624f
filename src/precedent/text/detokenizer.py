"""Token ids to text, a few at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no complete UTF-8 character (yet)."""


class IncrementalDetokenizer:
    """Turns bursts of token ids into text, special tokens skipped but for `shown` ones; never half a UTF-8 character.

    Tokens are taken one by one, so the text and the token at which it appears do not depend on how ids are cut into
    bursts. Each token is decoded together with the ids shown last, because many decoders treat the first token of a
    text differently (they strip its space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_tokens(tokenizer, shown)
        self._shown: list[int] = []
        self._shown_length = 0
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; it may lag behind them."""
        return "".join(self._push_one(int(token)) for token in token_ids)

    def flush(self) -> str:
        """The text still held back; an unfinished character comes out as U+FFFD."""
        return self._show(self._decode()) if self._pending else ""

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode()
        if text.endswith(UNFINISHED) or len(text) <= self._shown_length:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[self._shown_length :]
        self._shown, self._pending = self._pending, []
        self._shown_length = len(self._text_of(self._shown))
        return new

    def _decode(self) -> str:
        return self._text_of(self._shown + self._pending)

    def _text_of(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids, self._hidden)


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """Ids and texts of the tokens that decoding skips as special."""
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def hidden_tokens(tokenizer: PreTrainedTokenizerBase, shown: Collection[int]) -> frozenset[int] | None:
    """The special tokens that do not show in a text, None for all of them."""
    return frozenset(special_token_ids(tokenizer)) - frozenset(shown) if shown else None


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], hidden: frozenset[int] | None) -> str:
    """The text of ids without `hidden` tokens, None for without any special token."""
    if hidden is not None:
        ids = [token for token in ids if token not in hidden]
    text = tokenizer.decode(list(ids), skip_special_tokens=hidden is None, clean_up_tokenization_spaces=False)
    return str(text)
