"""Text to token ids and back, as drafters need it: the ids of a text as an answer holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from precedent.cache.store.fingerprint import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerCodec:
    """A tokenizer as drafters see it. `end_token_id` ends an answer, None where the tokenizer names no such token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = _encoder(tokenizer)
        self._newline = self._ids("\n")
        end: int | None = tokenizer.eos_token_id
        self.end_token_id = end

    @cached_property
    def fingerprint(self) -> str:
        """See `precedent.cache.tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text from the middle of another: behind a newline, lest the tokenizer add a leading space."""
        ids = self._ids(f"\n{text}")
        behind = len(self._newline)
        return ids[behind:] if ids[:behind] == self._newline else self._ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def answer_ids(self, answer: str | Sequence[int] | None) -> tuple[int, ...]:
        """The ids of a whole answer, its end token included; ids are taken as they are, and nothing stays nothing."""
        if not isinstance(answer, str):
            return tuple(int(token) for token in answer or ())
        ending = () if self.end_token_id is None else (self.end_token_id,)
        return (*self.encode(answer), *ending) if answer else ()


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Encodes without special tokens; by the backend where there is one, which takes a tenth of the time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
