"""Token ids to text that is safe to show: detokenized, then held back while it could become a stop string."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The character that decoders write for bytes that are not (yet) a complete UTF-8 character."""

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


class StopScanner:
    """Scans text for stop strings and holds back what could still become one.

    Of several stop strings, the one that is completed first ends the answer, however the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return `(emit, stopped)`: the text that may be shown now, and whether a stop string is complete."""
        if self._stopped:
            return "", True
        text = self._held + text
        start = self._first_match(text)
        if start is not None:
            self._held, self._stopped = "", True
            return text[:start], True
        shown = len(text) - max((partial_match(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Return the held-back text at the end of the answer, since it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(matches)[1] if matches else None


def partial_match(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    start = text.find(marker[:1], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[:1], start + 1)
    return len(text) - start if start >= 0 else 0


class TextAssembler:
    """Assembles the text of one request from bursts of tokens; the text does not depend on how the tokens are split.

    `shown_tokens` are special tokens that stay in the text; the others are skipped.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), shown_tokens: Collection[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown_tokens)
        self._scanner = StopScanner(stop) if stop else None
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text and how many of the tokens count (fewer if a stop string ends the answer among them)."""
        if self._scanner is None:
            return self._detokenizer.push(token_ids), len(token_ids)
        shown = ""
        for count, token in enumerate(token_ids, start=1):
            text, self.stopped = self._scanner.push(self._detokenizer.push([token]))
            shown += text
            if self.stopped:
                return shown, count
        return shown, len(token_ids)

    def flush(self) -> str:
        """Return the text still held back at the end of the answer; nothing after a stop string."""
        if self.stopped:
            return ""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        text, self.stopped = self._scanner.push(rest)
        return text if self.stopped else text + self._scanner.flush()
