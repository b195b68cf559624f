"""Text to token ids and back for drafters: a text gets the ids that it would have inside an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from precedent.cache.store.fingerprint import tokenizer_fingerprint
from precedent.text.end_tokens import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerCodec:
    """A tokenizer as drafters see it. `end_token_id` ends an answer; None if the tokenizer defines no such token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = _encoder(tokenizer)
        self._newline = self._ids("\n")
        self.end_token_id = turn_end(tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """See `precedent.cache.tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Encode a text as it would appear mid-answer: after a newline, so that the tokenizer adds no leading space."""
        ids = self._ids(f"\n{text}")
        skipped = len(self._newline)
        return ids[skipped:] if ids[:skipped] == self._newline else self._ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def answer_ids(self, answer: str | Sequence[int] | None) -> tuple[int, ...]:
        """The ids of a whole answer: encodes a text and adds its end token, keeps ids as they are. None becomes ()."""
        if not isinstance(answer, str):
            return tuple(int(token) for token in answer or ())
        ending = () if self.end_token_id is None else (self.end_token_id,)
        return (*self.encode(answer), *ending) if answer else ()


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """An encoder that adds no special tokens. It uses the Rust backend if there is one, which is ten times faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
